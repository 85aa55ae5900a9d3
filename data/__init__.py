"""Builders of the targets and prompts that the tests and the demo use; see README.md here."""
