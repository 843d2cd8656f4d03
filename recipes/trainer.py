"""`Trainer` for recipes: objectives and optimizer groups from outside, a stop at the first number that is none, and a
log of what the memory does.

Axis legend: B rows of a batch   T tokens of a row
"""

import logging
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import TrainerCallback

from tnt_hf.conversion.verify_measures import perplexity_of
from tnt_hf.recipes.callbacks import ChunkSizeSchedule, Printer, Progress, WindowDropout
from tnt_hf.recipes.environment import peak_memory_bytes
from tnt_hf.recipes.exact_resume import ResumableTrainer
from tnt_hf.recipes.finite import stop_if_not_finite, warn_of_idle
from tnt_hf.recipes.memory_statistics import first_row, gate_label, memory_statistics
from tnt_hf.recipes.model_folder import TRAINING
from tnt_hf.recipes.models import finished
from tnt_hf.recipes.objectives import next_token, next_token_sums
from tnt_hf.recipes.optimization import try_optimizer
from tnt_hf.recipes.packing import FILLER
from tnt_hf.recipes.preemption import CheckpointOnTermination
from tnt_hf.recipes.run_record import count_parameters, lacking, write_run_record
from tnt_hf.recipes.training_plots import draw_plots


logger = logging.getLogger(__name__)


class RecipeTrainer(ResumableTrainer):
    """
    `Trainer` whose loss is an objective of a recipe; [`fit`] is what to call.

    Args:
        model: a causal language model, maybe with LoRA. args: `TrainingArguments`.
        train_dataset, eval_dataset, data_collator: as for `Trainer`; batches have `input_ids` and `labels` `[B, T]`.
        processing_class: the tokenizer, saved with the model.
        callbacks: further ones, such as [`WindowDropout`], [`ChunkSizeSchedule`] and `LiZACallback`.
        objective: `(model, inputs, num_items, teacher) -> (loss, outputs)`. Evaluation is by the next token always,
            so that runs of all modes compare.
        teacher: a frozen model that the objective asks.
        groups: optimizer groups, `{"params", "lr", "weight_decay", "kind"}`; by default those of `Trainer`.
        data_state: what the order of the rows depends on; a run goes on only with an equal one.
        memory_logging_steps: optimizer steps between two readings of [`memory_statistics`], 0 = never. Each reads one
            row once more, without gradients.
        plots: whether to draw loss.png and gates.png at the end.

    Raises:
        ValueError: `memory_logging_steps` is not a number >= 0, `label_smoothing_factor` is set,
            `metric_for_best_model` is not the loss, or the optimizer or the learning rate schedule cannot be made.
    """

    loss_is_scaled_for_ga = True  # by `num_items_in_batch`

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        train_dataset=None,
        eval_dataset=None,
        data_collator=None,
        processing_class=None,
        callbacks: list[TrainerCallback] | None = None,
        objective: Callable = next_token,
        teacher: nn.Module | None = None,
        groups: list[dict] | None = None,
        data_state: dict[str, Any] | None = None,
        memory_logging_steps: int = 10,
        plots: bool = True,
    ):
        whole = isinstance(memory_logging_steps, int) and not isinstance(memory_logging_steps, bool)
        if not whole or memory_logging_steps < 0:
            raise ValueError(f"memory_logging_steps={memory_logging_steps!r}: must be a number of steps, 0 for never")
        if args.label_smoothing_factor:
            raise ValueError(f"label_smoothing_factor={args.label_smoothing_factor}: no objective smooths labels")
        if args.metric_for_best_model not in (None, "loss", "eval_loss"):
            raise ValueError(
                f"metric_for_best_model={args.metric_for_best_model!r}: an evaluation gives eval_loss only"
            )
        if args.n_gpu > 1:
            logger.warning(
                "%d GPUs are visible to this one process, which uses the first; start it with `accelerate launch` to"
                " use all of them.",
                args.n_gpu,
            )
            args._n_gpu = 1  # or Trainer would copy the model to all GPUs in every step (DataParallel)
        args.logging_nan_inf_filter = False  # it would hide a loss that is not finite
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = False  # a search in every step for what is not there
        on_termination, args.enable_jit_checkpoint = args.enable_jit_checkpoint, False  # or Trainer would, in its way
        if on_termination:
            callbacks = [*(callbacks or ()), CheckpointOnTermination()]
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=data_collator,
            processing_class=processing_class,
            callbacks=callbacks,
            groups=groups,
            data_state=data_state,
        )
        args.enable_jit_checkpoint = on_termination
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and not self.is_fsdp_enabled:
            raise ValueError(
                f"distributed_type=FSDP: accelerate leaves it out on {self.args.world_size} x {self.args.device}, and"
                " every process would hold everything; take an accelerator for each process, or another"
                " distributed_type"
            )
        # All objectives count the tokens they score, of labels that they shift.
        self.model_accepts_loss_kwargs = self._loss_shifts_labels = True
        self.objective = objective
        self.teacher = None if teacher is None else teacher.eval().requires_grad_(False).to(args.device)
        self.memory_logging_steps, self.plots = memory_logging_steps, plots
        self._losses: list[Tensor] = []  # of the batches of this optimizer step
        self._tokens: int | Tensor = 0  # of this process since they were last added up
        self._batch, self._probed, self._memory_log, self._rates = None, 0, {}, {}
        for shown, ours in ((ProgressCallback, Progress), (PrinterCallback, Printer)):
            if any(type(callback) is shown for callback in self.callback_handler.callbacks):
                self.remove_callback(shown)
                self.add_callback(ours)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = str(self.folder / "runs")
        try_optimizer(self)

    def fit(self, resume: str | os.PathLike = "auto", facts: dict[str, Any] | None = None) -> dict[str, float]:
        """
        Train, or go on training; then save the model, `training.json` and the plots to `output_dir`.

        Args:
            resume: as for [`~ResumableTrainer.train_exactly`].
            facts: entries of `training.json` that the trainer cannot know: command, recipe, settings, mode, data.

        Returns:
            The final metrics: loss, and with an `eval_dataset` eval_loss and perplexity.

        Raises:
            ValueError: a checkpoint that is not complete or belongs to a run with other settings.
            FloatingPointError: a loss, also of an evaluation, or a gradient was not finite.
            Terminated: SIGTERM stopped it, after a checkpoint (`enable_jit_checkpoint`, [`CheckpointOnTermination`]).
            OSError: a checkpoint or the model could not be written.
        """
        try:
            self.train_exactly(resume)
        finally:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, (WindowDropout, CheckpointOnTermination)):
                    callback.restore()
            self._draw()
        counts, metrics = count_parameters(self.model), self._metrics()
        model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)  # no autocast from here on
        if (final := finished(model)) is not model:
            self.model = self.model_wrapped = final
        if self.had_ended:
            why = lacking(self.folder)
            self.accelerator.wait_for_everyone()  # all look before one of them writes
            if why is None:
                return metrics  # all of this was saved before; on a full disk, to save it again would lose it
            if self.is_world_process_zero():
                logger.warning("The results in %s are written again, from %s: %s", self.folder, self._resumed, why)
        with self.saving(self.folder):
            if self.args.should_save:
                (self.folder / TRAINING).unlink(missing_ok=True)  # written last, it says that all of this is one run
            self.save_model()
            if self.is_world_process_zero():
                write_run_record(self, facts or {}, counts, metrics)
        self.accelerator.wait_for_everyone()  # a process that leaves takes the others' connections with it
        return metrics

    def _metrics(self) -> dict[str, float]:
        metrics, last = {}, self.state.global_step
        if self.args.load_best_model_at_end:
            last = self._best_step() or last  # of the model that is saved
        for entry in self.state.log_history:
            if entry["step"] <= last:
                metrics |= {name: entry[name] for name in ("loss", "eval_loss") if name in entry}
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ChunkSizeSchedule) and "eval_loss" in metrics:
                then, now = (callback.sizes_at(step - 1) for step in (last, self.state.global_step))
                if then != now:  # the best weights were evaluated with other chunks than the model is saved with
                    metrics["eval_loss"] = self.evaluate()["eval_loss"]
        if "eval_loss" in metrics:
            metrics["perplexity"] = perplexity_of(metrics["eval_loss"])
        return metrics

    def _draw(self) -> None:
        if self.plots and self.is_world_process_zero():
            try:
                draw_plots(self.state.log_history, self.folder, gate_label(self.model))
            except Exception as error:  # a plot is no reason to lose a run, nor to hide why one stopped
                logger.warning("The plots could not be drawn: %s: %s", type(error).__name__, error)

    # ------------------------------------------------------------------------------------------------------- one step

    def _issue_warnings_after_load(self, load_result):
        """As in the library, but a tied weight, which is saved once, is not missing."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(type(load_result)(missing, load_result.unexpected_keys))

    def create_optimizer(self, model=None):
        """The optimizer of the arguments over `groups`."""
        if self.optimizer is None and self.groups is not None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model if model is None else model)
            self.optimizer = kind([dict(group) for group in self.groups], **options)
        return super().create_optimizer(model)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of one optimizer step; a stream must not end before the run."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if len(batches) < num_batches and not hasattr(self.train_dataset, "__len__"):
            raise ValueError(
                f"train_dataset: the stream ended in step {self.state.global_step + 1} of {self.state.max_steps};"
                " repeat it, or lower max_steps"
            )
        return batches, num_items

    def get_train_dataloader(self):
        """As `Trainer`; with `enable_jit_checkpoint` its workers outlive SIGTERM."""
        return self._shielded(super().get_train_dataloader())

    def _shielded(self, loader: DataLoader) -> DataLoader:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, CheckpointOnTermination):
                callback.shield(loader)
        return loader

    def training_step(self, model, inputs, num_items_in_batch=None):
        """One batch, forward and backward."""
        self._batch = inputs
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._losses.append(loss)
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The objective."""
        with self.accelerator.autocast():  # for the teacher: only the trained model brings its own
            loss, outputs = self.objective(model, inputs, num_items_in_batch, self.teacher)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        return (loss, outputs) if return_outputs else loss

    def _clip_grad_norm(self, model):
        self._stop_if_not_finite()  # first: clipping by a norm that is not finite spoils every gradient
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model, grad_norm=None):
        if grad_norm is None:
            self._stop_if_not_finite()
        return super()._get_grad_norm(model, grad_norm)

    def _stop_if_not_finite(self) -> None:
        losses, self._losses = self._losses, []
        stop_if_not_finite(self.state.global_step + 1, losses, self.model, self.accelerator.scaler is None)
        if self.state.global_step == self._initial_global_step and not self.is_deepspeed_enabled:
            warn_of_idle(self.model)

    # -------------------------------------------------------------------------------------------------------- logging

    def _get_learning_rate(self) -> float:
        groups = [(group.get("kind"), group["lr"]) for group in self.optimizer.param_groups]
        self._rates = {f"learning_rate/{kind}": float(rate) for kind, rate in groups if kind is not None}
        return self._rates.get("learning_rate/base", super()._get_learning_rate())

    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, model, *others, **kwargs):
        step, control, args = self.state.global_step, self.control, self.args
        # Before the last step of an epoch is saved, and not after it: who goes on from there begins the next epoch
        ends = args.eval_strategy == "epoch" and self.state.epoch == int(self.state.epoch) >= args.eval_delay
        if step >= self.state.max_steps:
            control.should_log = ends = True
        if ends and self.eval_dataset is not None:
            last = self.state.log_history[-3:]
            control.should_evaluate = not any("eval_loss" in entry and entry["step"] == step for entry in last)
        due = self.memory_logging_steps > 0 and step % self.memory_logging_steps == 0 and step > self._probed
        if due or control.should_log or control.should_save or control.should_evaluate:  # whose best may be saved
            self._count_tokens()
        if due:
            self._probe()
            if self._memory_log and not control.should_log:
                self.log({})
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *others, **kwargs)
        if any(isinstance(x, CheckpointOnTermination) and x.agreed for x in self.callback_handler.callbacks):
            self._save_checkpoint(model, None)  # with save_strategy="best" an evaluation takes the save back
            self.callback_handler.on_save(args, self.state, control)

    def _probe(self) -> None:
        self._probed = self.state.global_step
        row = first_row(self._prepare_inputs(self._batch))
        if row is not None:
            with self.off_the_clock(), self.compute_loss_context_manager():
                self._memory_log = memory_statistics(self.model, row)

    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs({name: x for name, x in inputs.items() if name != FILLER})

    def _track_num_input_tokens(self, inputs) -> None:
        mask = inputs.get("attention_mask")
        here = inputs["input_ids"].numel() if mask is None else mask.sum()
        self._tokens = self._tokens + here - (inputs[FILLER].sum() if FILLER in inputs else 0)

    def _count_tokens(self) -> None:
        """Bring `state.num_input_tokens_seen`, which checkpoints keep, up to date over all processes."""
        here = torch.as_tensor(self._tokens, dtype=torch.int64, device=self.args.device).clone()
        if dist.is_initialized():
            dist.all_reduce(here)
        self._tokens = 0
        self.state.num_input_tokens_seen += int(here)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to an entry of the log what is known here."""
        if "loss" in logs:
            seen, seconds = self.state.num_input_tokens_seen, time.perf_counter() - self._clock
            logs |= {"tokens": seen, "tokens_per_second": (seen - self._tokens_logged) / max(seconds, 1e-9)}
            self._tokens_logged, self._clock = seen, time.perf_counter()
            logs |= {"peak_memory_mib": peak_memory_bytes(self.args.device) / 2**20} | self._rates
            earlier = next((entry["step"] for entry in reversed(self.state.log_history) if "loss" in entry), 0)
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, WindowDropout):
                    logs["window_dropout"] = callback.share(earlier, self.state.global_step)
        if "eval_loss" in logs:
            logs["eval_perplexity"] = perplexity_of(logs["eval_loss"])
        logs |= self._memory_log
        self._memory_log = {}
        super().log(logs, start_time)

    # ------------------------------------------------------------------------------------------------------ evaluation

    def get_eval_dataloader(self, eval_dataset=None):
        """As `Trainer`, but of all rows: `dataloader_drop_last` is about the batches of training."""
        dropped, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            return self._shielded(super().get_eval_dataloader(eval_dataset))
        finally:
            self.args.dataloader_drop_last = dropped

    def evaluate(self, *args, **kwargs):
        """As `Trainer`; its time does not count for tokens per second."""
        with self.off_the_clock():
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        """As `Trainer`, but the loss is the mean over all scored tokens, not over rows of the means of their batches:
        it does not depend on how rows are cut into batches or divided among processes (with RoPE of the types dynamic
        and longrope, whose frequencies follow the longest row of a batch, it does where rows are not packed)."""
        self._evaluated = torch.zeros(2, dtype=torch.float64)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        losses, tokens = self._evaluated.tolist()
        if not tokens:
            raise ValueError(f"eval_dataset: no token of its {output.num_samples} rows is scored, so there is no loss")
        if not math.isfinite(losses):
            raise FloatingPointError(
                f"step {self.state.global_step}: {metric_key_prefix}_loss={losses / tokens}: the model computes no"
                " numbers any more, and nothing of it was saved. Lower learning rates, a lower max_grad_norm or"
                " memory_grad_bound usually help."
            )
        output.metrics[f"{metric_key_prefix}_loss"] = losses / tokens
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Adds up one batch of all processes. Returns its mean loss alone: nothing here reads logits."""
        with torch.no_grad(), self.compute_loss_context_manager(), self.accelerator.autocast():
            sums = next_token_sums(model, self._prepare_inputs(inputs))
        # Without the rows that fill up the last batch so that every process has one. Summed in float64 on the CPU, as
        # not every device has it.
        sums = self.accelerator.gather_for_metrics(sums).cpu().double().sum(0)
        self._evaluated += sums
        return (sums[0] / sums[1].clamp(min=1)).float().to(self.args.device), None, None
