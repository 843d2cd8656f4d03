"""Transformers' ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin and PipelineTesterMixin against TNT.

Axis legend: B batch, T tokens, H heads, D head width. What is run, where the tests come from and every departure
from the stock mixins: README.md beside this file.
"""

import atexit
import shutil
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
from tiny import TINY
from transformers import cache_utils
from transformers.cache_utils import Cache, StaticCache
from transformers.models.auto import get_values
from transformers.models.auto import modeling_auto as auto

from tnt_hf import TNTCache, TNTConfig, TNTForCausalLM, TNTModel
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.costs_tnt import memory_state_shapes
from tnt_hf.modeling_tnt import TNTForQuestionAnswering, TNTForSequenceClassification, TNTForTokenClassification

from . import transformers_suite
from .pipeline_stand_ins import write_summary, write_tiny_models


CLASSES = (
    TNTModel,
    TNTForCausalLM,
    TNTForSequenceClassification,
    TNTForTokenClassification,
    TNTForQuestionAnswering,
)
PIPELINES = {
    "feature-extraction": TNTModel,
    "text-generation": TNTForCausalLM,
    "text-classification": TNTForSequenceClassification,
    "token-classification": TNTForTokenClassification,
}

try:
    # Each worker has its own folder; the mixin reads the summary at import, the models are written when they are used.
    TINY_MODELS = Path(tempfile.mkdtemp(prefix="tnt_tiny_models_"))
    atexit.register(shutil.rmtree, TINY_MODELS, ignore_errors=True)
    write_summary(TINY_MODELS, PIPELINES.values())
    suite = transformers_suite.load(str(TINY_MODELS))
except transformers_suite.SuiteUnavailableError as error:
    pytest.skip(f"Transformers' own tests were NOT run: {error}", allow_module_level=True)


HAS_GENERATION = suite.source.has(transformers_suite.GENERATION_TESTS)
GENERATION_IS_MISSING = (
    "Transformers' GenerationTesterMixin was NOT run: the sdist of transformers does not carry "
    f"tests/generation/test_utils.py; name a checkout's tests folder in {transformers_suite.ENVIRONMENT_VARIABLE}"
)


def setUpModule():
    write_tiny_models(TINY_MODELS, small_config(vocab_size=259), PIPELINES.values())


def small_config(**changes) -> TNTConfig:
    """A model whose every boundary lies within a few tokens: window 4, C_G = 8, S_L = 16, C_L = 2 and 4."""
    fields = TINY | {
        "vocab_size": 99,
        "intermediate_size": 37,
        "layer_types": ["sliding_attention", "full_attention"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.02,  # the library's own default, which its tolerances are made for
    }
    return TNTConfig(**fields | changes)


class TNTModelTester:
    """The configuration and inputs the mixins ask for; 19 tokens pass every chunk, window and reset boundary."""

    config_class = TNTConfig
    base_model_class = TNTModel
    causal_lm_class = TNTForCausalLM
    is_training = True
    batch_size = 5
    seq_length = 19
    hidden_size = 32
    vocab_size = 99
    num_hidden_layers = 2
    num_attention_heads = 4
    num_key_value_heads = 2
    type_sequence_label_size = 2
    num_labels = 3
    padding_side = "right"  # as the stock testers

    def __init__(self, parent, **changes):
        self.parent = parent
        self.changes = changes

    def get_config(self) -> TNTConfig:
        return small_config(**self.changes)

    def prepare_config_and_inputs_for_common(self):
        """A configuration with `input_ids` and `attention_mask`, both `[B, T]` int64."""
        config = self.get_config()
        # No special tokens: several mixin tests derive a mask from them.
        input_ids = torch.randint(3, config.vocab_size, (self.batch_size, self.seq_length))
        lengths = torch.linspace(1, self.seq_length, self.batch_size).long()
        attention_mask = (torch.arange(self.seq_length) < lengths[:, None]).long()
        if self.padding_side == "left":
            attention_mask = attention_mask.flip(1)
        return config, {"input_ids": input_ids, "attention_mask": attention_mask}

    def prepare_config_and_inputs_for_model_class(self, model_class):
        return self.prepare_config_and_inputs_for_common()


class TNTCacheChecks:
    """The form of TNT's cache and attentions; the mixin's own checks know one state per layer and no window."""

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        self.assertIsInstance(past_key_values, Cache)
        self.assertEqual(len(past_key_values.layers), config.num_hidden_layers)
        static = isinstance(past_key_values, StaticCache)
        shapes = memory_state_shapes(config)
        for layer, kind in zip(past_key_values.layers, config.layer_types):
            length = seq_length
            if "sliding" in kind:
                # The dynamic layer keeps the W - 1 keys that the next query can still see.
                length = min(length, config.sliding_window - (0 if static else 1))
            expected = (batch_size, config.num_key_value_heads, length, config.head_dim)
            if config.variant == "lmm" and kind.startswith("hybrid"):
                expected = (batch_size, 1, length, 0)  # no attention: keys of no width count the positions
            self.assertEqual(tuple(layer.keys.shape), expected)
            self.assertEqual(tuple(layer.values.shape), expected)
            if kind.startswith("hybrid"):
                states = [layer.conv_states[0]] if config.memory_conv_kernel > 1 else []
                states += [layer.recurrent_states[j] for j in range(config.number_of_conv_states)]
                self.assertEqual([tuple(s.shape[1:]) for s in states], [shape for _, shape in shapes])
                self.assertTrue(all(s.shape[0] == batch_size for s in states))

    def _check_caches_are_equal(self, cache1, cache2):
        self.assertEqual(len(cache1.layers), len(cache2.layers))
        for one, other in zip(cache1.layers, cache2.layers):
            self.assertIs(type(one), type(other))
            torch.testing.assert_close(one.keys, other.keys)
            torch.testing.assert_close(one.values, other.values)
            for name in ("conv_states", "recurrent_states"):  # which layers without a memory do not have
                states, others = getattr(one, name, {}), getattr(other, name, {})
                self.assertEqual(states.keys(), others.keys())
                for j in states:
                    if states[j] is None:
                        self.assertIsNone(others[j])
                    else:
                        torch.testing.assert_close(states[j], others[j])

    def _check_attentions_for_generate(
        self, batch_size, attentions, prompt_length, output_length, config, decoder_past_key_values
    ):
        cache = decoder_past_key_values
        self.assertEqual(len(attentions), output_length - prompt_length)
        for step, layers in enumerate(attentions):
            queries = 1 if cache is not None and step > 0 else prompt_length + step
            attend = [
                i for i, kind in enumerate(config.layer_types) if config.variant != "lmm" or "hybrid" not in kind
            ]
            self.assertEqual(len(layers), len(attend))
            for i, attention in zip(attend, layers):
                kind = config.layer_types[i]
                keys = prompt_length + step
                if "sliding" in kind and cache is not None and step > 0:
                    keys = min(keys, config.sliding_window)
                elif "sliding" not in kind and isinstance(cache, StaticCache):
                    keys = cache.layers[i].max_cache_len
                keys += config.num_persistent_tokens
                self.assertEqual(tuple(attention.shape), (batch_size, config.num_attention_heads, queries, keys))


def label_names(mapping) -> list[str]:
    """Class names with labels of one kind: the library's, and ours, which register at run time and are in no table."""
    ours = {
        id(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES): TNTForCausalLM,
        id(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES): TNTForSequenceClassification,
        id(auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES): TNTForTokenClassification,
        id(auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES): TNTForQuestionAnswering,
        id(auto.MODEL_MAPPING_NAMES): TNTModel,
    }.get(id(mapping))
    return get_values(mapping) + ([ours.__name__] if ours is not None else [])


# Without this the mixin's training tests would find no labels for our classes and pass on nothing.
suite.common.get_values = label_names


class TNTModelTest(
    TNTCacheChecks,
    suite.common.ModelTesterMixin,
    suite.generation.GenerationTesterMixin,
    suite.pipeline.PipelineTesterMixin,
    suite.training.TrainingTesterMixin,
    unittest.TestCase,
):
    all_model_classes = CLASSES
    pipeline_model_mapping = PIPELINES

    def setUp(self):
        self.model_tester = TNTModelTester(self)
        self.config_tester = suite.configuration.ConfigTester(self, config_class=TNTConfig, hidden_size=32)

    # `_init_weights` covers every weight; the mixin would skip a file without a copyright year as an old model.
    test_can_init_all_missing_weights_before_2023 = True

    def test_config(self):
        self.config_tester.run_common_tests()

    @pytest.mark.long
    def test_bc_torch_dtype(self):
        super().test_bc_torch_dtype()

    @pytest.mark.long
    def test_training_overfit(self):
        super().test_training_overfit()

    def test_bc_cache_name_forward(self):
        """The mixin's, which knows the library's own class of caches only."""
        if CACHE_NAME != "cache":
            self.skipTest("new in transformers 5.24")
        with mock.patch.object(cache_utils, "DynamicCache", TNTCache):
            super().test_bc_cache_name_forward()

    # The mixin skips packing for every stateful model, because most leak state between documents. TNT does not.
    def test_eager_padding_matches_padding_free_with_position_ids(self):
        self.check_packing("eager")

    def test_sdpa_padding_matches_padding_free_with_position_ids(self):
        self.check_packing("sdpa")

    def check_packing(self, attn_implementation):
        if not HAS_GENERATION:
            self.skipTest(GENERATION_IS_MISSING)
        with mock.patch.object(TNTForCausalLM, "_is_stateful", False):
            self.attention_mask_padding_matches_padding_free_with_position_ids(attn_implementation)


if HAS_GENERATION:

    class HarshGeneration(TNTCacheChecks, suite.generation.GenerationTesterMixin):
        """The generation mixin with weights of std 0.3, prompts that end inside every chunk, and eleven new tokens."""

        all_model_classes = all_generative_model_classes = (TNTForCausalLM,)
        has_attentions = True
        max_new_tokens = 11
        changes: dict = {}
        # Minutes each, and about tracing rather than numbers: `TNTModelTest` runs them.
        test_generate_compile_model_forward_fullgraph = None
        test_generate_compilation_all_outputs = None
        test_static_cache_no_recompile_with_smaller_length = None

        def setUp(self):
            self.model_tester = TNTModelTester(self, initializer_range=0.3, **self.changes)
            self.model_tester.seq_length = 37
            # What generate() asks for. Padding on the right is then a gap between the prompt and what follows, which
            # takes room in the window of the library's static cache (as for every model) and none in TNTCache.
            self.model_tester.padding_side = "left"

        def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
            return suite.common.ModelTesterMixin._prepare_for_class(self, inputs_dict, model_class, return_labels)

    def harsh(changes):
        """A test class for one configuration; slow, because `TNTModelTest` runs the same tests on the default one."""
        return pytest.mark.slow(type("TNTHarshGeneration", (HarshGeneration, unittest.TestCase), {"changes": changes}))

    TNTHarshDefaultTest = harsh({})
    TNTHarshLinearTest = harsh({"memory_depth": 1, "memory_momentum": True, "memory_decay": True})
    TNTHarshPublishedTest = harsh({"memory_gate": "published", "num_persistent_tokens": 3})
    TNTHarshSharedTest = harsh({"memory_projections": "shared", "memory_conv_kernel": 3, "qk_projection": "chunk"})
    TNTHarshMalTest = harsh({"variant": "mal"})
    TNTHarshLmmTest = harsh({"variant": "lmm"})

else:

    def test_generation_mixin_is_missing():
        pytest.skip(GENERATION_IS_MISSING)
