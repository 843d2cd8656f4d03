"""Tiny checkpoints for the pipeline mixin, and what it runs on them where the source has no per-task pipeline tests.

The mixin of Transformers takes its checkpoints from the Hub and its per-task checks from `tests/pipelines/`. The first
does not know TNT, so `write_tiny_models` makes a folder of the form that the mixin accepts in place of the Hub; the
second is not part of a source distribution, so `stand_in` has short checks of our own for the tasks TNT has.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.pipelines import (
    FeatureExtractionPipeline,
    TextClassificationPipeline,
    TextGenerationPipeline,
    TokenClassificationPipeline,
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte after three special ones (259 in all): nothing to train or to download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    # From 10,000 tokens on the text-generation tests take a model for what TNT is: one without a longest input.
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", model_max_length=10_000, **names)


def write_tiny_models(folder: Path, config, classes) -> None:
    """Writes `<folder>/<model type>/<class name>` for every class, each with weights and the byte tokenizer.

    Args:
        folder: an existing empty folder; the mixin finds it through `TRANSFORMERS_TINY_MODEL_PATH`.
        config: configuration of the tiny models; its `vocab_size` must hold the tokenizer's 259 tokens.
        classes: model classes, all of the type of `config`.
    """
    tokenizer = byte_tokenizer()
    for model_class in classes:
        target = folder / config.model_type / model_class.__name__
        model_class(config).save_pretrained(target)
        tokenizer.save_pretrained(target)


def write_summary(folder: Path, classes) -> None:
    """Writes the list of tiny models that the mixin reads when it is imported."""
    entry = {"tokenizer_classes": ["PreTrainedTokenizerFast"], "processor_classes": []}
    (folder / "reports").mkdir(parents=True)
    (folder / "reports" / "tiny_model_summary.json").write_text(json.dumps({c.__name__: entry for c in classes}))


class _Checks:
    """What the mixin asks of a per-task class: a pipeline with examples, and checks on that pipeline."""

    pipeline_class: type
    options: dict = {}

    def get_test_pipeline(self, model, tokenizer=None, dtype="float32", **processors):
        pipeline = self.pipeline_class(model=model, tokenizer=tokenizer, dtype=dtype, **self.options)
        return pipeline, ["This is a test", "Another, longer test of the same thing"]

    def run_pipeline_test(self, pipeline, examples):
        single = [pipeline(text) for text in examples]
        together = pipeline(examples, batch_size=len(examples))
        for one, other in zip(single, together):
            self.check_equal(one, other)
        self.check(pipeline, single[0], examples[0])

    def check_equal(self, one, other):
        """Left padding of a batch must change nothing."""
        assert one == other, (one, other)

    def check(self, pipeline, output, text):
        raise NotImplementedError


class TextGenerationPipelineTests(_Checks):
    pipeline_class = TextGenerationPipeline
    options = {"max_new_tokens": 5, "do_sample": False}

    def check(self, pipeline, output, text):
        assert output[0]["generated_text"].startswith(text)
        tail = pipeline(text, return_full_text=False)[0]["generated_text"]
        assert output[0]["generated_text"] == text + tail
        inputs = pipeline.tokenizer(text, return_tensors="pt")
        ids = pipeline.model.generate(**inputs, **self.options, pad_token_id=pipeline.tokenizer.pad_token_id)
        assert output[0]["generated_text"] == pipeline.tokenizer.decode(ids[0], skip_special_tokens=True)
        sampled = pipeline([text, text + text], num_return_sequences=2, do_sample=True, batch_size=2)
        assert [len(row) for row in sampled] == [2, 2]


class FeatureExtractionPipelineTests(_Checks):
    pipeline_class = FeatureExtractionPipeline

    def check_equal(self, one, other):
        # The batch is padded on the left: the features of the text are the last ones.
        one, other = torch.tensor(one[0]), torch.tensor(other[0])
        torch.testing.assert_close(other[-one.shape[0] :], one, rtol=1e-3, atol=1e-4)

    def check(self, pipeline, output, text):
        features = torch.tensor(output)
        length = len(pipeline.tokenizer(text)["input_ids"])
        assert features.shape == (1, length, pipeline.model.config.hidden_size)
        assert torch.tensor(pipeline(text * 100, truncation=True)).shape[1] == 100 * length


class TextClassificationPipelineTests(_Checks):
    pipeline_class = TextClassificationPipeline

    def check_equal(self, one, other):
        # A list even for one text.
        other = other if isinstance(other, list) else [other]
        assert [item["label"] for item in one] == [item["label"] for item in other]

    def check(self, pipeline, output, text):
        assert all(0 <= item["score"] <= 1 and item["label"] in pipeline.model.config.label2id for item in output)


class TokenClassificationPipelineTests(_Checks):
    pipeline_class = TokenClassificationPipeline

    def check_equal(self, one, other):
        # Not `index`, which counts the padding.
        assert [(item["word"], item["entity"]) for item in one] == [(item["word"], item["entity"]) for item in other]

    def check(self, pipeline, output, text):
        labels = pipeline.model.config.label2id
        assert all(item["entity"] in labels and 0 <= item["score"] <= 1 for item in output)
        assert [item["index"] for item in output] == sorted({item["index"] for item in output})


TASKS = {
    "text_generation": TextGenerationPipelineTests,
    "feature_extraction": FeatureExtractionPipelineTests,
    "text_classification": TextClassificationPipelineTests,
    "token_classification": TokenClassificationPipelineTests,
}


def stand_in(task: str) -> dict | None:
    """The module contents that stand in for `pipelines/test_pipelines_<task>.py`; None for tasks TNT does not have."""
    return {TASKS[task].__name__: TASKS[task]} if task in TASKS else None
