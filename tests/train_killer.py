"""Training runs that die, each in a process of its own, and what is left of them.

Usage: train_killer.py FOLDER PART..., with the parts `steps`, `saves`, `full`, `ranks`, `sigterm`; `every` makes them
thorough.

After each death the next run must go on and end with the same weights, optimizer, random states and log as a run that
nobody killed, to the bit. Prints the number of deaths.
"""

import gc
import itertools
import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from forks import in_a_child
from transformers import TrainerCallback, TrainingArguments

from tnt_hf import TNTConfig, TNTForCausalLM
from tnt_hf.recipes import exact_resume
from tnt_hf.recipes.callbacks import ChunkSizeSchedule, WindowDropout
from tnt_hf.recipes.checkpoints import checkpoints, fault, latest_complete_checkpoint
from tnt_hf.recipes.objectives import next_token
from tnt_hf.recipes.optimization import parameter_groups
from tnt_hf.recipes.trainer import RecipeTrainer
from tnt_hf.termination import Terminated


STEPS, SAVE_STEPS, LOGGING_STEPS = 8, 3, 2  # logs and saves at different steps, so that a log spans a death
ROWS = 20  # five steps to an epoch, so that the run crosses its end
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 16,
    "global_chunk_size": 8,
    "local_chunk_sizes": [2, 4],
    "local_reset_interval": 16,
    "attention_dropout": 0.1,  # so that the random state matters
    "bos_token_id": None,
    "eos_token_id": None,
}
TIMES = ("tokens_per_second", "peak_memory_mib", "peak_memory_bytes", "runtime", "per_second")
MOMENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class Die(TrainerCallback):
    """SIGKILL, or another signal, when `step` optimizer steps are done: "step", before anything is logged or saved;
    "substep", in the middle of the next one; "evaluation"; "save", after one."""

    def __init__(self, step: int, moment: str, number: int = signal.SIGKILL):
        self.step, self.moment, self.number = step, moment, number

    def _die(self, state):
        if state.global_step == self.step:
            # As on a cluster, those that load data too; from a child, for a parent's SIGTERM is their regular end.
            everyone = [*(child.pid for child in multiprocessing.active_children()), os.getpid()]
            in_a_child(lambda: [os.kill(process, self.number) for process in everyone])

    def on_substep_end(self, args, state, control, **kwargs):
        if self.moment == "substep":
            self._die(state)

    def on_step_end(self, args, state, control, **kwargs):
        if self.moment == "step":
            self._die(state)

    def on_save(self, args, state, control, **kwargs):
        if self.moment == "save":
            self._die(state)

    def on_prediction_step(self, args, state, control, **kwargs):
        if self.moment == "evaluation":
            self._die(state)


def samples(rows: int = ROWS, length: int = 32) -> list[dict]:
    ids = torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(folder: Path, data=None, more=(), data_state=None, config=None, model=None, **changes) -> RecipeTrainer:
    torch.manual_seed(0)
    model = TNTForCausalLM(TNTConfig(**CONFIG | (config or {}))) if model is None else model
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "save_steps": SAVE_STEPS,
        "logging_steps": LOGGING_STEPS,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
    }
    args = TrainingArguments(str(folder), **settings | changes)
    callbacks = [WindowDropout(0.5, seed=args.seed), ChunkSizeSchedule({4: [4, 8]}), *more]
    groups = parameter_groups(model, args.learning_rate, 0.1, gate_learning_rate=3e-2)
    data = samples() if data is None else data
    return RecipeTrainer(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=samples(4),
        callbacks=callbacks,
        groups=groups,
        data_state=data_state,
        memory_logging_steps=2,
        plots=False,
    )


def limit_files(size: int) -> None:
    """No file may grow beyond `size` bytes; what is printed goes nowhere, as that may be a file, too."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def was_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXFSZ)


def log_of(folder: Path) -> list[dict]:
    """The entries of the log without what a clock says."""
    entries = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in entry.items() if not key.endswith(TIMES)}
        for entry in entries
        if "train_runtime" not in entry  # of one session
    ]


def outcome(folder: Path) -> dict:
    """Everything of a run that must be equal to the bit."""
    last = folder / f"checkpoint-{STEPS}"
    assert fault(last) is None, fault(last)
    found = {"model": (folder / "model.safetensors").read_bytes(), "last": (last / "model.safetensors").read_bytes()}
    for path in sorted([*last.glob("*.pt"), *last.glob("*.pth")]):
        found[path.name] = path.read_bytes()
    found["log"] = log_of(folder)
    record = json.loads((folder / "training.json").read_text())
    found["record"] = {key: record[key] for key in ("steps", "tokens_trained", "metrics", "parameters")}
    return found


def check(folder: Path, expected: dict) -> None:
    found = outcome(folder)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == value, key
    shutil.rmtree(folder)


def die_at_steps(folder: Path, expected: dict, cases) -> int:
    for step, moment in cases:
        where = folder / "killed"
        assert was_killed(in_a_child(lambda: trainer(where, more=[Die(step, moment)]).fit()))  # noqa: B023
        assert in_a_child(lambda: trainer(where).fit()) == 0  # noqa: B023
        check(where, expected)
    return len(cases)


def die_in_save(folder: Path, moment: int, moments: tuple[str, ...] = MOMENTS) -> int:
    """Dies before file operation number `moment` in checkpoints. Returns how many there are if it gets further."""
    reader, writer = os.pipe()

    def work():
        count = itertools.count()

        def hook(event, arguments):
            if event in moments and f"{folder}/checkpoint-" in str(arguments[0]) and next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        run = trainer(folder, save_total_limit=1)
        sys.addaudithook(hook)
        run.fit()
        os.write(writer, str(next(count)).encode())

    status = in_a_child(work)
    os.close(writer)
    with open(reader) as found:
        text = found.read()
    assert status == 0 or was_killed(status), "failed instead of dying"
    return int(text or 0)


def die_in_saves(folder: Path, expected: dict, total: int, every: bool) -> int:
    """At file operations of the saves, and in the middle of a write: past so many bytes the system kills."""
    where = folder / "killed"
    per_save = total // 3
    sealing = (1, ("os.rename",))  # the second checkpoint is written, and about to be declared complete
    moments = [sealing, *((moment, MOMENTS) for moment in (range(total) if every else [per_save // 2]))]
    for moment in moments:
        assert die_in_save(where, *moment) == 0
        left = [path.name for path in checkpoints(where) if fault(path) is None]
        # save_total_limit=1: the last complete one goes only when the next is complete.
        assert left or not (where / f"checkpoint-{2 * SAVE_STEPS}").exists(), (moment, checkpoints(where))
        assert in_a_child(lambda: trainer(where, save_total_limit=1).fit()) == 0
        check(where, expected)

    def cut(size):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        run = trainer(where)
        limit_files(size)
        run.fit()

    sizes = (20_000, 90_000)  # in the model's file, in the optimizer's
    for size in sizes:
        assert was_killed(in_a_child(lambda size=size: cut(size)))
        assert [fault(path) for path in checkpoints(where)], "died before the save"
        assert in_a_child(lambda: trainer(where).fit()) == 0
        check(where, expected)
    return len(moments) + len(sizes)


def fill_the_disk(folder: Path) -> None:
    """The limit on a file's size stands in for the disk's: both are errors of a write in the middle of a file."""
    where = folder / "full"
    assert in_a_child(lambda: trainer(where, max_steps=SAVE_STEPS).fit()) == 0

    def work():
        run = trainer(where, lr_scheduler_type="cosine")
        limit_files(30_000)
        try:
            run.fit()
        except OSError as error:
            assert "checkpoint-6 could not be written" in str(error), error
            assert f"checkpoint-{SAVE_STEPS} is complete and intact" in str(error), error
            assert "\n" not in str(error)
            return
        raise AssertionError("no error")

    assert in_a_child(work) == 0
    assert [path.name for path in checkpoints(where)] == [f"checkpoint-{SAVE_STEPS}"]
    assert fault(where / f"checkpoint-{SAVE_STEPS}") is None


# --- SIGTERM ---


def stops(folder: Path, cases, **options) -> None:
    """It stops by SIGTERM after so many steps, or as many processes as there are cases do, and leaves a checkpoint."""

    def work(rank=0):
        step, moment = cases[rank]
        run = trainer(folder, more=[Die(step, moment, signal.SIGTERM)], enable_jit_checkpoint=True, **options)
        seal = exact_resume.seal
        exact_resume.seal = lambda *given: (time.sleep(0.5), seal(*given))  # digests of gigabytes take longer
        try:
            run.fit()
        except Terminated:
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            last = latest_complete_checkpoint(folder).name
            assert last == f"checkpoint-{run.state.global_step}", last  # whichever process asks
            return
        raise AssertionError("it went on")

    assert (ranks(work, len(cases)) if len(cases) > 1 else [in_a_child(work)]) == [0] * len(cases)


def terminate(folder: Path, expected: dict, every: bool) -> int:
    """Each run stops after the step, with a checkpoint, and goes on to the bit; the last has no step left."""
    where, evaluated = folder / "terminated", {"eval_strategy": "steps", "eval_steps": 5}
    cases = [(0, "substep"), (SAVE_STEPS, "step"), (STEPS, "step")] + [(4, "substep"), (5, "step")] * every
    for step, moment in cases:
        stops(where, [(step, moment)])
        step += moment == "substep"
        assert latest_complete_checkpoint(where).name == f"checkpoint-{step}"
        assert not (where / "training.json").exists()  # it has not ended
        assert in_a_child(lambda: trainer(where).fit()) == 0
        check(where, expected)
    stops(where, [(5, "evaluation")], **evaluated)
    assert latest_complete_checkpoint(where).name == "checkpoint-5"
    assert any("eval_loss" in entry for entry in log_of(where))
    shutil.rmtree(where)
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}  # those of the evaluation live on
    for number, moment in ((4, "substep"), (5, "evaluation")):
        stops(where, [(number, moment)], **workers, **evaluated)
        assert latest_complete_checkpoint(where).name == "checkpoint-5"
        shutil.rmtree(where)
    for number, moment in ((4, "substep"), (SAVE_STEPS, "save")):  # the other of two processes hears of it
        stops(where, [(-1, "step"), (number, moment)], gradient_accumulation_steps=2)
        assert latest_complete_checkpoint(where).name == f"checkpoint-{number + 1}"
        shutil.rmtree(where)
    return len(cases) + 5


# --- two processes ---


def ranks(work, count: int = 2) -> list[int]:
    """Runs `work(rank)` in `count` processes of one gloo group, as torchrun starts them. Returns their wait statuses;
    when one dies the others are killed, which is what torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = {}
    for rank in range(count):
        child = os.fork()
        if child == 0:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            try:
                work(rank)
                torch.distributed.destroy_process_group()
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
                os._exit(1)
            os._exit(0)
        children[child] = rank
    statuses = [0] * count
    while children:
        child, status = os.wait()
        statuses[children.pop(child)] = status
        if was_killed(status):
            for other in children:
                os.kill(other, signal.SIGKILL)
    return statuses


def two_ranks(folder: Path) -> None:
    """Two processes see what one sees with twice the accumulation, and both stop when one must."""
    options = {"gradient_accumulation_steps": 1, "save_strategy": "no", "per_device_eval_batch_size": 3}  # of 4 rows
    calm = {"config": {"attention_dropout": 0.0}}  # each process draws its own
    assert in_a_child(lambda: trainer(folder / "alone", save_strategy="no", **calm).fit()) == 0
    assert ranks(lambda rank: trainer(folder / "two", **options, **calm).fit()) == [0, 0]
    one, two = log_of(folder / "alone"), log_of(folder / "two")
    for key, count in (("loss", STEPS // LOGGING_STEPS), ("eval_loss", 1)):
        losses = [[entry[key] for entry in log if key in entry] for log in (one, two)]
        assert len(losses[0]) == len(losses[1]) == count
        # The same sums in another order: float32 rounding of a loss near 4, which the steps carry on.
        assert all(abs(a - b) < 2e-5 for a, b in zip(*losses)), losses
    assert [entry.get("tokens") for entry in one] == [entry.get("tokens") for entry in two]

    def spoil(rank):
        run = trainer(folder / "infinite", **options)

        def infinite(*inputs):  # with gradients that are finite, so that nothing but the loss tells
            loss, outputs = next_token(*inputs)
            return loss + math.inf, outputs

        run.objective = infinite if rank else next_token
        try:
            run.fit()
        except FloatingPointError as error:
            assert str(error).startswith("step 1: " + ("the loss is inf" if rank else "another process")), error
            return
        raise AssertionError("no error")

    assert ranks(spoil) == [0, 0]
    assert not (folder / "infinite" / "model.safetensors").exists()


def die_in_ranks(folder: Path) -> int:
    """One of two processes is killed; both go on, and one alone may not."""
    options = {"gradient_accumulation_steps": 1}
    assert ranks(lambda rank: trainer(folder / "pair", **options).fit()) == [0, 0]
    expected, where = outcome(folder / "pair"), folder / "killed"

    def die(rank):
        trainer(where, more=[Die(5, "step")] if rank else [], **options).fit()

    assert any(map(was_killed, ranks(die)))
    assert [path.name for path in checkpoints(where)] == [f"checkpoint-{SAVE_STEPS}"]
    assert in_a_child(lambda: refused(where)) == 0
    assert ranks(lambda rank: trainer(where, **options).fit()) == [0, 0]
    check(where, expected)
    return 1


def refused(where: Path) -> None:
    try:
        trainer(where).fit()
    except ValueError as error:
        assert "world_size=1: the run was begun with 2" in str(error), error
        return
    raise AssertionError("no error")


def main(folder: Path, parts: list[str]) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays; every run collects what it can
    whole = folder / "whole"
    operations, expected = die_in_save(whole, -1), outcome(whole)
    deaths = 0
    if "steps" in parts:
        cases = [(5, "substep")]
        if "every" in parts:
            cases = [(s + (m == "step"), m) for s in range(STEPS) for m in ("substep", "step")]
        deaths += die_at_steps(folder, expected, cases)
    if "saves" in parts:
        deaths += die_in_saves(folder, expected, operations, "every" in parts)
    if "full" in parts:
        fill_the_disk(folder)
    if "ranks" in parts:
        two_ranks(folder)
        deaths += die_in_ranks(folder) if "every" in parts else 0
    if "sigterm" in parts:
        deaths += terminate(folder, expected, "every" in parts)
    print(deaths, "deaths")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
