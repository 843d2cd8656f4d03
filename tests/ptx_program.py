"""PTX as text, parsed: one kernel as Triton's compiler leaves it."""

from __future__ import annotations

import re

import numpy as np


UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
FLOAT = {4: np.float32, 8: np.float64}


def dtype_of(suffix: str) -> np.dtype:
    """b32, u32: unsigned; s32; f32; pred: bool."""
    if suffix == "pred":
        return np.dtype(bool)
    letter, bits = re.fullmatch(r"([bsuf])(\d+)", suffix).groups()
    return np.dtype({"s": SIGNED, "f": FLOAT}.get(letter, UNSIGNED)[int(bits) // 8])


def split(text: str) -> list[str]:
    """Operands, those in braces or brackets together."""
    found, depth, start = [], 0, 0
    for i, c in enumerate(text + ","):
        depth += (c in "{[") - (c in "}]")
        if c == "," and not depth:
            found.append(text[start:i].strip())
            start = i + 1
    return [x for x in found if x]


def operand(text: str) -> tuple:
    """("register", name), ("integer", value), ("bits", of a float32), ("vector", operands), ("address", base, offset)
    or ("symbol", name)."""
    if text[0] == "{":
        return "vector", [operand(x) for x in split(text[1:-1])]
    if text[0] == "[":
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        return "address", operand(base), int(offset or "0", 0)
    text = text.partition("|")[0]  # of a shuffle's second result
    if text[0] == "%" or text == "_":
        return "register", text
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return "bits", int(text[2:], 16)
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
        return "integer", int(text.rstrip("U"), 0)
    return "symbol", text


class Instruction:
    """`@guard name operands`, `parts` being the name's: ld, global, v4, b32."""

    def __init__(self, text: str):
        self.text = text
        inverted, self.guard, name, rest = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?(\S+)\s*(.*)", text, re.S).groups()
        self.inverted, self.name = inverted == "!", name
        self.parts = name.replace("shared::cta", "shared").split(".")  # Triton 3.8 writes what 3.9 leaves out
        self.operands = [operand(x) for x in split(rest)]


class Program:
    """The instructions of a PTX text with one kernel."""

    def __init__(self, text: str):
        text = re.sub(r"//[^\n]*", "", text)
        head, _, body = text[text.index(".entry") :].partition("\n{\n")
        body = body[: body.index("\n}")]
        self.parameters = re.findall(r"\.param \.(\w+)[^,)]*?(\w+)\s*[,)]", head.replace("\n", " "))
        self.threads = int(re.search(r"\.reqntid (\d+)", head)[1])
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.families: dict[str, int] = {}  # of registers: "%rd" -> bytes, 0 for predicates
        lines = (line for line in body.split("\n") if not line.strip().startswith((".loc", ".pragma")))
        for statement in "\n".join(lines).split(";"):
            statement = " ".join(statement.split())
            while label := re.match(r"([$\w]+): *", statement):
                self.labels[label[1]] = len(self.code)
                statement = statement[label.end() :]
            if declared := re.fullmatch(r"\.reg \.(\w+) (%\w+)<\d+>", statement):
                self.families[declared[2]] = 0 if declared[1] == "pred" else dtype_of(declared[1]).itemsize
            elif statement:
                self.code.append(Instruction(statement))

    def width(self, register: str) -> int:
        """Bytes; 0 for a predicate."""
        return self.families[register.rstrip("0123456789")]
