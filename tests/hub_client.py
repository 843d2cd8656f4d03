"""The processes of the Hub test: `push` owns the package and uploads a model, `pull` is a stranger who downloads it.

Usage: hub_client.py push RESULTS | hub_client.py pull RESULTS SITE_PACKAGES HIDDEN_PACKAGE...
Both write what the model computes to RESULTS, so that the test can compare the processes bit for bit.
"""

import sys
from importlib.machinery import PathFinder


REPO = "user/tiny-tnt"
HEADS = {"SequenceClassification": "logits", "TokenClassification": "logits", "QuestionAnswering": "start_logits"}


class FinderWithout(PathFinder):
    """The normal import system as if `hidden` packages were not installed: not found, rather than an odd error."""

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] in cls.hidden else super().find_spec(fullname, path, target)


def hide(*packages: str):
    FinderWithout.hidden = frozenset(packages)
    sys.meta_path[:] = [FinderWithout if finder is PathFinder else finder for finder in sys.meta_path]


def inputs():
    """Two rows of 21 tokens, the first with 5 pads on the left: (input_ids, attention_mask), both [2, 21] int64."""
    import torch

    input_ids = torch.randint(3, 97, (2, 21), generator=torch.Generator().manual_seed(1))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :5] = 0
    return input_ids, attention_mask


def results(backbone, model) -> dict:
    """What has to be identical on both sides, as a dict of tensors."""
    import torch

    input_ids, attention_mask = inputs()
    batch = {"input_ids": input_ids, "attention_mask": attention_mask}
    with torch.inference_mode():
        found = {
            "hidden_states": backbone.eval()(**batch).last_hidden_state,
            "logits": model.eval()(**batch).logits,
            "greedy": model.generate(**batch, max_new_tokens=12, do_sample=False),
        }
        torch.manual_seed(2)
        found["sampled"] = model.generate(**batch, max_new_tokens=12, do_sample=True)
        model.set_local_chunk_sizes([1])
        found["stage2_logits"] = model(**batch).logits
        found["stage2_greedy"] = model.generate(**batch, max_new_tokens=12, do_sample=False)
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}


def head_results(models: dict) -> dict:
    """The same of the models of `HEADS`, by head."""
    import torch

    input_ids, attention_mask = inputs()
    with torch.inference_mode():
        return {
            head: models[head].eval()(input_ids=input_ids, attention_mask=attention_mask)[output].clone().contiguous()
            for head, output in HEADS.items()
        }


def push(results_file: str):
    import torch
    import transformers
    from safetensors.torch import save_file

    from tnt_hf import TNTConfig, TNTForCausalLM
    from tnt_hf.cli import load_config

    config = TNTConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        global_chunk_size=8,
        local_chunk_sizes=[2, 4],
        local_reset_interval=16,
        num_persistent_tokens=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = TNTForCausalLM(config)
    heads = {head: getattr(transformers, f"AutoModelFor{head}").from_config(config) for head in HEADS}
    with torch.no_grad():
        for parameter in (p for m in (model, *heads.values()) for p in m.parameters()):
            # every tensor must matter, or a lost one would go unnoticed
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None  # generate the full length
    model.push_to_hub(REPO)
    assert load_config(REPO, []).memory_specs == config.memory_specs  # `tnt info` takes a Hub id
    for head, classifier in heads.items():
        classifier.push_to_hub(f"{REPO}-{head}")
    save_file(head_results(heads) | results(model.model, model), results_file)  # which changes the config


def pull(results_file: str, site_packages: str, *hidden: str):
    sys.path.append(site_packages)
    hide("tnt_hf", *hidden)
    from importlib.util import find_spec

    for package in ("tnt_hf", *hidden):
        assert find_spec(package) is None, f"{package} can still be imported"

    import transformers
    from huggingface_hub import snapshot_download
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(REPO, trust_remote_code=True)
    backbone, loading = AutoModel.from_pretrained(REPO, trust_remote_code=True, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"], loading
    model, loading = AutoModelForCausalLM.from_pretrained(REPO, trust_remote_code=True, output_loading_info=True)
    assert not any(loading.values()), loading
    names = [type(x).__name__ for x in (config, backbone, model)]
    assert names == ["TNTConfig", "TNTModel", "TNTForCausalLM"], names
    for x in (config, backbone, model):
        assert type(x).__module__.startswith("transformers_modules."), type(x).__module__
    folder = snapshot_download(REPO)
    from_folder = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    for name, tensor in model.state_dict().items():
        assert tensor.equal(from_folder.state_dict()[name]), name
    model.save_pretrained("half", variant="fp16")  # a name that is not a `TNTConfig.variant`
    again = AutoModelForCausalLM.from_pretrained("half", variant="fp16", trust_remote_code=True)
    assert all(p.equal(q) for p, q in zip(again.parameters(), model.parameters()))

    heads = {}
    for head in HEADS:
        auto = getattr(transformers, f"AutoModelFor{head}")
        heads[head], loading = auto.from_pretrained(f"{REPO}-{head}", trust_remote_code=True, output_loading_info=True)
        assert not any(loading.values()), loading
        assert type(heads[head]).__module__.startswith("transformers_modules.")
        from_folder = auto.from_pretrained(snapshot_download(f"{REPO}-{head}"), trust_remote_code=True)
        assert all(p.equal(q) for p, q in zip(from_folder.parameters(), heads[head].parameters()))
        trained = heads[head].model.state_dict()
        for other in (AutoModel, AutoModelForCausalLM):  # the same repository as a backbone and as a language model
            loaded = other.from_pretrained(f"{REPO}-{head}", trust_remote_code=True).base_model
            assert all(tensor.equal(trained[name]) for name, tensor in loaded.state_dict().items())
        _, loading = auto.from_pretrained(REPO, trust_remote_code=True, output_loading_info=True)  # a head to train
        assert all(key.startswith(("score.", "qa_outputs.")) for key in loading["missing_keys"]), loading
    save_file(head_results(heads) | results(backbone, model), results_file)


if __name__ == "__main__":
    {"push": push, "pull": pull}[sys.argv[1]](*sys.argv[2:])
