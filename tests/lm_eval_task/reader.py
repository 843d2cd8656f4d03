"""Reads questions.jsonl, which lies beside this file, for the tasks of this folder."""

import json
from pathlib import Path

from datasets import Dataset


def questions(**_) -> dict[str, Dataset]:
    """The test split: question, choices, answer (index of a choice)."""
    lines = Path(__file__).with_name("questions.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}
