"""Checkpoints and configurations that differ from what a run has written, with valid checksums."""

import json

import torch

from paceline.records import checkpoint_files
from paceline.system import files


def write_checked(path, content):
    """Writes a JSON file with its checksum."""
    path.write_text(json.dumps({**content, files.CHECKSUM: files.checksum_of(content)}))


def rewrite_json(path, **changed):
    """Changes entries of a JSON file that has a checksum; an entry that is None goes."""
    content = files.read_checked_json(path) | changed
    write_checked(path, {key: value for key, value in content.items() if value is not None})


def rewrite(found, name, **changed):
    """Changes entries of a part of a complete checkpoint; an entry that is None goes."""
    content = torch.load(found / name, weights_only=True) | changed
    replace(found, name, {key: value for key, value in content.items() if value is not None})


def replace(found, name, content):
    """Changes all of a part of a complete checkpoint."""
    about = checkpoint_files.describe(found)
    digests = about.pop("sha256")
    (found / "complete.json").unlink()
    for part, digest in digests.items():
        if part != name:
            (found / f"{part}.sha256").write_text(digest)
    folder, number = found.parent, int(found.name)
    checkpoint_files.write_part(folder, number, name, content)
    num_servers = sum(part.startswith("server-") for part in digests)
    rest = {key: value for key, value in about.items() if key not in ("number", "workers")}
    assert checkpoint_files.complete(folder, number, about["workers"], rest, num_servers=num_servers)
