"""Wheels of old speculators releases: fetched once into data/cache/wheels, unpacked where a test wants them."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).parents[1] / "data" / "cache" / "wheels"


def wheel(version: str) -> Path:
    """The wheel of that release; downloaded by name, without its dependencies, if the cache lacks it."""
    name = f"speculators-{version}-py3-none-any.whl"
    if not (CACHE / name).exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            command = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, f"speculators=={version}"]
            subprocess.run([sys.executable, *command], check=True)
            Path(folder, name).rename(CACHE / name)
    return CACHE / name


def unpack(version: str, site: Path) -> Path:
    """Unpack the wheel as a site-packages folder; returns it."""
    with zipfile.ZipFile(wheel(version)) as archive:
        archive.extractall(site)
    return site
