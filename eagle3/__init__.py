"""eagle3-train: train an EAGLE-3 draft model on a target's own hidden states and serve it with vLLM.

The numbered scripts at the top level are the stages; each module here is the only owner of one idea.
"""

__version__ = "0.1.0"
