"""Conversations without a download: functions of Python's standard library, asked for by what they say they do.

    python -m tnt_hf.recipes.conversations conversations.jsonl

Every line is `{"messages": [...]}`: the user gives the name and the first paragraph of the docstring, the assistant
answers with the function, which no longer holds it.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tnt_hf.recipes.corpus import read_corpus


def conversations(text: str) -> Iterator[dict]:
    """One conversation for each function of a module that has a docstring and does something beside it."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or not (about := ast.get_docstring(node)) or len(node.body) < 2:
            continue
        node.body, node.decorator_list = node.body[1:], []
        asked = f"Write {node.name}: {' '.join(about.split(chr(10) * 2)[0].split())}"
        talk = (("user", asked), ("assistant", ast.unparse(node)))
        yield {"messages": [{"role": role, "content": content} for role, content in talk]}


def write_conversations(path: Path) -> int:
    """
    Write those of the standard library to `path`, a `.jsonl` file. Returns their number.

    Raises:
        FileExistsError: there is such a file already.
    """
    corpus = read_corpus()
    files = corpus.train | corpus.held_out
    lines = [json.dumps(talk) + "\n" for name in sorted(files) for talk in conversations(files[name])]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.writelines(lines)
    return len(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__ or "usage: python -m tnt_hf.recipes.conversations FILE")
    try:
        print(f"{write_conversations(Path(sys.argv[1])):,} conversations are in {sys.argv[1]}")
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
