"""A stranger's file, outside the repository, defines a matcher and checks it."""

import os
import subprocess
import sys
from pathlib import Path

import centroidkv

MATCHER = """
import torch
from centroidkv.records import Assignment
from centroidkv.testing import check_matcher

class {name}:
    exact = False
    def __call__(self, keys, degree, partition, similarity, edges):
        joins = torch.arange(keys.shape[2]).repeat(*keys.shape[:2], 1)
        for block in partition.blocks if edges else ():
            for sources, targets in zip(block.sources, block.targets):
                if len(sources) and len(targets):
                    best = similarity(keys[:, :, sources[:1]], keys[:, :, targets])[:, :, 0].argmax(-1)
                    joins[:, :, sources[0]] = targets[best] + {shift}
                    return Assignment(joins)
        return Assignment(joins)

check_matcher({name}(), greedy=False)
print("obeys the laws")
"""


def run(path, text):
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(centroidkv.__file__).parents[1])}
    command = [sys.executable, str(path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=path.parent, env=environment)


def test_a_strangers_matcher_is_checked_in_one_line(tmp_path):
    ran = run(tmp_path / "mine.py", MATCHER.format(name="FirstSource", shift=0))
    assert ran.stdout.strip() == "obeys the laws", ran.stderr


def test_a_strangers_mistake_is_explained(tmp_path):
    ran = run(tmp_path / "mine.py", MATCHER.format(name="OffByOne", shift=1))
    assert ran.returncode != 0
    for part in ("OffByOne", "breaks the law", "smallest input found", "expected", "got"):
        assert part in ran.stderr
