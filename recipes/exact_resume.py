"""A `Trainer` that a killed run continues to the bit: weights, optimizer, data order and log.

`Trainer` restores weights, optimizer, schedule, random states and the place in the data. It does not tell a partial
checkpoint from a complete one, deletes complete ones while a newer one is being written, forgets the loss since the
last log, trains one step too many where nothing is left, and asks nobody whether the settings are still the same.
"""

import json
import logging
import math
import operator
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainerState
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import logging as hf_logging

from tnt_hf.conversion.files import naming
from tnt_hf.recipes.callbacks import ChunkSizeSchedule
from tnt_hf.recipes.checkpoints import (
    best_of,
    bring_back,
    callback_settings,
    check_checkpoint,
    check_same_run,
    delete_old_checkpoints,
    latest_complete_checkpoint,
    make_room,
    run_state,
    seal,
    settle,
    step_of,
)


logger = logging.getLogger(__name__)

LOG = "training_log.jsonl"


def _line(entry: dict[str, Any]) -> str:
    """An entry of the log as JSON, which knows no number that is not finite: it is null there."""
    known = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in entry.items()}
    return json.dumps(known, allow_nan=False) + "\n"


@contextmanager
def own_class(model: nn.Module):
    """A context in which a model that FSDP2 shards is of the class it was made of. FSDP2 gives it one that is made in
    a file of torch, and `save_pretrained` would put that file beside the weights as the model's code."""
    sharded = type(model)
    model.__class__ = next(x for x in sharded.__mro__ if not issubclass(x, FSDPModule))
    try:
        yield
    finally:
        model.__class__ = sharded


class SeededLengthGroupedSampler(LengthGroupedSampler):
    """The library's draws from the global random state, which a run that goes on has only after its first batches."""

    def __init__(self, seed: int, *args, **kwargs):
        super().__init__(*args, generator=torch.Generator(), **kwargs)
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.generator.manual_seed(self.seed + epoch)


class ResumableTrainer(Trainer):
    """
    `Trainer` with complete checkpoints; [`train_exactly`] is what to call.

    Attributes:
        folder: `output_dir`. groups, data_state: as for [`RecipeTrainer`], for the check that the run is the same.
        seconds: of training, over all sessions, when last saved. had_ended: nothing was left to train.
    """

    def __init__(self, *args, groups: list[dict] | None = None, data_state: dict[str, Any] | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.groups, self.data_state, self.folder = groups, data_state or {}, Path(self.args.output_dir)
        self.seconds, self.had_ended = 0.0, False
        self.seconds_training = 0.0  # of them, without evaluations and checkpoints
        self._seconds_off, self._off_since = 0.0, None
        self._run: dict[str, Any] = {}  # see run_state
        self._resumed: Path | None = None
        self._named: Path | None = None  # what somebody asked to go on from, and may ask again
        self._started = False
        self._sampler = None
        self._tokens_logged = 0
        self._clock = self._begun = time.perf_counter()  # of tokens per second, and of the whole run

    def train_exactly(self, resume: str | os.PathLike = "auto") -> None:
        """
        Train, or go on training.

        Args:
            resume: "auto" goes on from the newest complete checkpoint in `output_dir`, if there is one; "never" starts
                anew and refuses a folder with checkpoints; else the path of a checkpoint.

        Raises:
            ValueError: a checkpoint that is not complete or belongs to a run with other settings.
            OSError: a checkpoint could not be written.
        """
        if isinstance(resume, bool) or not str(resume).strip():
            raise ValueError(f"resume={resume!r}: must be 'auto', 'never' or the path of a checkpoint")
        config = getattr(self.model, "config", None)
        rates = {group.get("kind", str(i)): group["lr"] for i, group in enumerate(self.groups or [])}
        self._run = run_state(
            self.args,
            self.args.world_size,
            {} if config is None else config.to_dict(),
            self.data_state,
            learning_rates=rates,
            callbacks=callback_settings(self.callback_handler.callbacks),
        )
        self._started, self._resumed = False, self._checkpoint(resume)
        self.had_ended = self._resumed is not None and self._has_ended(self._resumed)
        if self.had_ended:
            self._load_from_checkpoint(str(self._resumed))
            self._restore_progress()
            self._end_again()
        else:
            if self._resumed is not None:
                self.args.eval_on_start = False  # it was
                if self.is_world_process_zero():
                    print(f"going on from {self._resumed}", flush=True)
            self.train(resume_from_checkpoint=None if self._resumed is None else str(self._resumed))
        self.seconds = time.perf_counter() - self._begun
        self.seconds_training = self.seconds - self._seconds_off

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """As `Trainer`, for [`train_exactly`], which has looked at the checkpoint."""
        if resume_from_checkpoint and not self._run:
            how = f"resume_from_checkpoint={resume_from_checkpoint!r}"
            raise ValueError(f"{how}: would go on from what nobody has looked at; call fit(resume='auto' or a path)")
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _end_again(self) -> None:
        """What training ends with, where only the results of a run are missing."""
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            self._load_best_model()
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ChunkSizeSchedule):
                callback.on_train_begin(self.args, self.state, self.control, model=self.model)

    # ------------------------------------------------------------------------------------------------------- resuming

    def _checkpoint(self, resume: str | os.PathLike) -> Path | None:
        automatic = resume in ("auto", "never")
        if self.args.should_save:
            bring_back(self.folder)
        self.accelerator.wait_for_everyone()
        self._named = None if automatic else Path(resume)
        newest = latest_complete_checkpoint(self.folder, intact=resume == "auto") if automatic else Path(resume)
        if resume == "never" and newest is not None:
            asked = "resume='never' (--resume_from_checkpoint never)"
            raise ValueError(f"{asked}: {self.folder} holds {newest.name} already; choose another output_dir")
        if not automatic:
            check_checkpoint(newest)
        if dist.is_initialized():
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, None if newest is None else newest.name)
            if len(set(found)) > 1:
                raise ValueError(f"output_dir={str(self.folder)!r}: the processes see different checkpoints, {found}")
        if newest is not None:
            check_same_run(newest, self._run)
            if not any(newest.glob("rng_state*.pth")):
                raise ValueError(
                    f"{newest} was saved with save_only_model=True, so its run cannot be continued; start a new run"
                    " with --model naming it."
                )
        return newest

    def _has_ended(self, checkpoint: Path) -> bool:
        """Whether nothing is left to train; if so, restores the state."""
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        steps = self.args.max_steps if self.args.max_steps > 0 else state.max_steps
        if steps != state.max_steps:
            logger.warning(
                "max_steps=%d: the run was begun with %d, so its learning rates follow another curve from here.",
                steps,
                state.max_steps,
            )
        if state.global_step < steps:
            return False
        self.state = state
        self.state.is_world_process_zero = self.is_world_process_zero()
        return True

    def _get_train_sampler(self, train_dataset=None):
        sampler = super()._get_train_sampler(train_dataset)
        if type(sampler) is LengthGroupedSampler:
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            sampler = SeededLengthGroupedSampler(seed, sampler.batch_size, lengths=sampler.lengths)
        self._sampler = sampler
        return sampler

    def _run_epoch(self, *args, epoch: int, **kwargs):
        if not self._started:
            self._restore_progress()
        # Between accelerate's loader and the sampler may lie batches that are shared, and skipped.
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        return super()._run_epoch(*args, epoch=epoch, **kwargs)

    def _restore_progress(self) -> None:
        """Go on with what `Trainer` forgets: the loss since the last log, tokens, time, and the log file."""
        self._started, self._clock, self._begun = True, time.perf_counter(), time.perf_counter()
        self._tokens_logged, self._seconds_off = self.state.num_input_tokens_seen, 0.0
        if self._resumed is not None:
            self.state.compute_steps(self.args, self.state.max_steps)  # how often to log, evaluate and save, as of now
            self._find_best(self._resumed.parent)
            progress = json.loads((self._resumed / self._progress_file()).read_text(encoding="utf-8"))
            self._tr_loss = torch.tensor(progress["loss"], device=self.args.device)
            self._total_loss_scalar = -progress["loss"]  # the summary at the end divides by the steps of this session
            self._globalstep_last_logged = progress["last_logged"]
            self.seconds, self._seconds_off = progress["seconds"], progress.get("seconds_off", 0.0)
            self._begun -= self.seconds
        if self.is_world_process_zero():
            self.folder.mkdir(parents=True, exist_ok=True)
            with naming(self.folder / LOG):
                (self.folder / LOG).write_text("".join(map(_line, self.state.log_history)), encoding="utf-8")

    def _find_best(self, folder: Path) -> None:
        """The state names the best checkpoint by the path that it was saved at; folders are moved.

        Raises:
            ValueError: it is to be loaded at the end, and is not complete, or not there any more.
        """
        name = best_of(self._resumed)
        if name is None or (not self.args.load_best_model_at_end and not (folder / name).is_dir()):
            return
        best = folder / name
        if self.args.load_best_model_at_end:
            check_checkpoint(best, "load_best_model_at_end: best", intact=best != self._resumed)  # which was just read
        self.state.best_model_checkpoint = str(best)

    def _progress_file(self) -> str:
        return f"progress_{self.args.process_index}.json"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer`, and append the entry to `training_log.jsonl`."""
        super().log(logs, start_time)
        if self.is_world_process_zero() and self._started:
            with naming(self.folder / LOG), open(self.folder / LOG, "a", encoding="utf-8") as file:
                file.write(_line(self.state.log_history[-1]))

    # --------------------------------------------------------------------------------------------------------- saving

    def _save_checkpoint(self, model, trial) -> None:
        folder = self.folder / f"checkpoint-{self.state.global_step}"
        limit = self.args.save_total_limit
        with self.off_the_clock(), self.saving(folder):
            if self.args.should_save:
                make_room(folder)
            self.accelerator.wait_for_everyone()
            self.args.save_total_limit = None  # only complete ones count, below
            self._note_best()
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.args.save_total_limit = limit
            now = time.perf_counter()
            progress = {
                "loss": self._tr_loss.item(),
                "last_logged": self._globalstep_last_logged,
                "seconds": now - self._begun,
                "seconds_off": self._seconds_off + now - self._off_since,
            }
            # With `save_only_model` one process alone has made it.
            folder.mkdir(parents=True, exist_ok=True)
            (folder / self._progress_file()).write_text(json.dumps(progress), encoding="utf-8")
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                seal(folder, self._run)
                settle(folder)
        if self.args.should_save:  # a failure of this costs no checkpoint
            with self.off_the_clock():
                delete_old_checkpoints(self.folder, limit, self.state.best_model_checkpoint, folder, self._named)

    def _best_step(self) -> int | None:
        """Of the best checkpoint, if there is one."""
        best = self.state.best_model_checkpoint
        return None if best is None else step_of(best)

    def _note_best(self) -> None:
        """The best of what is saved. The library's is the best that was evaluated, so that nothing after an evaluation
        between two checkpoints could be the best any more."""
        if self.args.metric_for_best_model is None:
            return
        losses = {entry["step"]: entry["eval_loss"] for entry in self.state.log_history if "eval_loss" in entry}
        here, known = self.state.global_step, losses.get(self._best_step())
        better = operator.gt if self.args.greater_is_better else operator.lt
        if here in losses and (known is None or better(losses[here], known)):
            self.state.best_global_step = here

    def _finalize_training(self, *args, **kwargs):
        """As in the library, which with `save_total_limit=1` would delete the newest checkpoint beside the best."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    def save_model(self, output_dir=None, _internal_call=False) -> None:
        """As `Trainer`. What FSDP shards is saved whole, also where its checkpoints are shards (SHARDED_STATE_DICT),
        of which the library would save none."""
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled and not _internal_call else None
        kind = None if plugin is None else plugin.state_dict_type
        try:
            if plugin is not None:
                plugin.set_state_dict_type("FULL_STATE_DICT")
            super().save_model(output_dir, _internal_call)
        finally:
            if plugin is not None:
                plugin.set_state_dict_type(kind)

    def _save(self, output_dir=None, state_dict=None) -> None:
        config, bars = getattr(self.model, "config", None), hf_logging.is_progress_bar_enabled()
        used = getattr(config, "use_cache", None)
        hf_logging.disable_progress_bar()  # one bar for each file would break the run's own into pieces
        try:
            if used is not None:
                config.use_cache = True  # it is off while training only
            with own_class(self.model):
                super()._save(output_dir, self._untied(state_dict))
        finally:
            if used is not None:
                config.use_cache = used
            if bars:
                hf_logging.enable_progress_bar()

    def _untied(self, state_dict: dict[str, Any] | None) -> dict[str, Any] | None:
        """Without the second names of tied weights, which the library knows by their storage; shards that were
        gathered have one each."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        return state_dict and {x: w for x, w in state_dict.items() if tied.get(x) not in state_dict}

    @contextmanager
    def saving(self, folder: Path):
        """Turns what goes wrong while writing into one OSError, and makes room again if the disk is full."""
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:
            # Slower processes may still write to it; of several, the next session settles that.
            if folder != self.folder and self.args.should_save and self.args.world_size == 1:
                settle(folder)
            newest = latest_complete_checkpoint(self.folder, intact=True)
            left = "there is no earlier checkpoint" if newest is None else f"{newest.name} is complete and intact"
            why = str(error).strip().partition("\n")[0][:200] or type(error).__name__
            raise OSError(f"{folder} could not be written ({why}); {left}.") from error

    @contextmanager
    def off_the_clock(self):
        """Time that does not count for tokens per second."""
        if self._off_since is not None:
            yield
            return
        self._off_since = time.perf_counter()
        try:
            yield
        finally:
            passed, self._off_since = time.perf_counter() - self._off_since, None
            self._clock += passed
            self._seconds_off += passed
