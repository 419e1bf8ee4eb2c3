"""Pins the images that docker/ and deploy/ take from a registry by the digests that it has for them. `make images`.

A version can be given another image later, a digest cannot.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

FILES = ("docker/Dockerfile", "docker/Dockerfile.cuda", "docker/compose.yaml", "deploy/kubernetes/base/valkey.yaml")
IMAGE = re.compile(r"^(FROM +| +image: )([\w./-]+:[\w.-]+)(?:@sha256:[0-9a-f]{64})?", re.MULTILINE)


def digest_of(image: str) -> str:
    """Return the digest that the registry has for an image. Raises SystemExit."""
    command = ["docker", "buildx", "imagetools", "inspect", "--format", "{{json .Manifest}}", image]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit("nothing is pinned: there is no docker here") from None
    if done.returncode:
        raise SystemExit(f"nothing is pinned: {(done.stderr.strip().splitlines() or [image])[-1]}")
    return str(json.loads(done.stdout)["digest"])


def main(root: Path) -> int:
    """Write all digests into the files, or none. Returns the exit status."""
    texts = {root / name: (root / name).read_text() for name in FILES}
    images = sorted({found[2] for text in texts.values() for found in IMAGE.finditer(text)})
    digests = {image: digest_of(image) for image in images}
    for path, text in texts.items():
        path.write_text(IMAGE.sub(lambda found: f"{found[1]}{found[2]}@{digests[found[2]]}", text))
    for image, digest in digests.items():
        print(f"{image} is {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent.parent))
