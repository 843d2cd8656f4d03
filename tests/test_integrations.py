"""Other people's tools work on saved models: lm_eval, TRL, `transformers serve` and `transformers chat`.

Two folders are tried: a TNT model, and one converted from a Llama, with its gates opened.

Axis legend: B batch   T tokens   V vocabulary
"""

import inspect
import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from evaluation_oracles import V, llama
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from tnt_hf import TNTConfig, TNTForCausalLM
from tnt_hf.conversion import LiZAConfig, convert_checkpoint, inject, load_injected
from tnt_hf.conversion.ablations import gates
from tnt_hf.recipes import with_tnt
from tnt_hf.recipes.chat import PLAIN_TEMPLATE
from tnt_hf.recipes.data import train_tokenizer


lm_eval = pytest.importorskip("lm_eval", reason="pip install 'tnt-hf[eval]'")

TASKS = Path(__file__).with_name("lm_eval_task")
QUESTIONS = [json.loads(line) for line in (TASKS / "questions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{"tnt": folder, "converted": folder}, both with tokenizer and chat template; in both the memory is audible."""
    root = tmp_path_factory.mktemp("integrations")
    tokenizer = train_tokenizer(["bytes"], V)
    tokenizer.chat_template = PLAIN_TEMPLATE
    torch.manual_seed(0)
    memory = {"global_chunk_size": 8, "local_chunk_sizes": [2, 4], "local_reset_interval": 16}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = TNTConfig(
        vocab_size=V, initializer_range=0.15, memory_gate_init=0.5, bos_token_id=0, eos_token_id=0, pad_token_id=None,
        sliding_window=6, max_position_embeddings=160, **sizes, **memory,
    )  # fmt: skip
    TNTForCausalLM(config).save_pretrained(root / "tnt")
    llama(max_position_embeddings=160, initializer_range=0.15, bos_token_id=0, eos_token_id=0).save_pretrained(
        root / "llama"
    )
    tokenizer.save_pretrained(root / "llama")
    convert_checkpoint(root / "llama", root / "converted", window=6, progress=False, **memory)
    model = AutoModelForCausalLM.from_pretrained(root / "converted")
    with torch.no_grad():
        for gate in gates(model):
            gate.scale.fill_(0.5)
    model.save_pretrained(root / "opened")
    for name in ("tnt", "opened"):
        tokenizer.save_pretrained(root / name)
    return {"tnt": root / "tnt", "converted": root / "opened"}


@pytest.fixture(params=["tnt", "converted"])
def folder(request, folders):
    return folders[request.param]


@pytest.fixture
def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def harness(folder: Path, batch_size: int) -> dict:
    """All three tasks: {task: results by document}, and the metrics."""
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "trust_remote_code": True, "dtype": "float32"},
        tasks=["tnt_choice", "tnt_rolling", "tnt_write"],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        batch_size=batch_size,
        device="cpu",
        bootstrap_iters=0,
    )
    found = {
        task: [row["filtered_resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
        for task, rows in results["samples"].items()
    }
    return {**found, "metrics": results["results"]}


def direct(model, tokenizer, context: str, continuation: str) -> tuple[float, bool]:
    """Log-likelihood of a continuation, alone in its batch, and whether it is the greedy one."""
    ids = tokenizer(context)["input_ids"] or [tokenizer.bos_token_id]
    more = tokenizer(continuation)["input_ids"]
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids, *more]])).logits[0, len(ids) - 1 : -1]
    scores = log_softmax(logits, -1)
    return float(scores[range(len(more)), more].sum()), logits.argmax(-1).tolist() == more


# ------------------------------------------------------------------------------------------------------------- lm_eval


@pytest.mark.long
def test_lm_eval_computes_what_the_model_says(folder, loaded):
    """In batches of 1 and of 4: log-likelihoods, rolling log-likelihoods and greedy continuations."""
    model, tokenizer = loaded
    one, four = harness(folder, 1), harness(folder, 4)
    for question, alone, together in zip(QUESTIONS, one["tnt_choice"], four["tnt_choice"]):
        expected = [direct(model, tokenizer, question["question"], f" {choice}") for choice in question["choices"]]
        for found in (alone, together):
            assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
            torch.testing.assert_close([x for x, _ in found], [x for x, _ in expected], rtol=1e-4, atol=1e-3)
    for question, alone, together in zip(QUESTIONS, one["tnt_rolling"], four["tnt_rolling"]):
        expected, _ = direct(model, tokenizer, "", question["question"])
        for found in (alone, together):
            assert float(found[0]) == pytest.approx(expected, rel=1e-4)
    for question, alone, together in zip(QUESTIONS, one["tnt_write"], four["tnt_write"]):
        ids = tokenizer(question["question"], return_tensors="pt")["input_ids"]
        written = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        expected = tokenizer.decode(written, skip_special_tokens=True).split("\n")[0]
        assert alone[0] == together[0] == expected
    assert any(alone[0].strip() for alone in one["tnt_write"])
    assert one["metrics"]["tnt_choice"]["acc,none"] == four["metrics"]["tnt_choice"]["acc,none"]


def test_padding_on_the_right_needs_no_mask(loaded):
    """As lm_eval batches: zeros behind shorter rows, no mask. Nothing looks ahead, so nothing before them changes."""
    model, tokenizer = loaded
    rows = [torch.tensor(tokenizer(question["question"])["input_ids"]) for question in QUESTIONS]
    with torch.inference_mode():
        together = model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)).logits
        for row, logits in zip(rows, together):
            alone = model(row[None]).logits[0]
            torch.testing.assert_close(
                logits[: len(row)], alone, rtol=1e-4, atol=1e-4
            )  # float32, sums in another order


def test_lm_eval_knows_the_models_context(folder):
    """Texts above max_position_embeddings are cut from the left there, and not at the harness' default of 2048."""
    from lm_eval.models.huggingface import HFLM

    assert HFLM(pretrained=str(folder), device="cpu", batch_size=1).max_length == 160


# ----------------------------------------------------------------------------------------------------------------- TRL


def conversations() -> list[dict]:
    """Ten conversations of different lengths."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} and {i}?"},
                {"role": "assistant", "content": f"It is {2 * i}." + " Sure." * (i % 4)},
            ]
        }
        for i in range(10)
    ]


def sft_trainer(folder: Path, output: Path, data: list[dict], model=None, **changes):
    """TRL's SFTTrainer on a saved model, on the CPU."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    peft_config = changes.pop("peft_config", None)
    settings = {
        "output_dir": str(output),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_length": 96,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "trust_remote_code": True,
        **changes,
    }
    return SFTTrainer(
        model=str(folder) if model is None else model,
        args=SFTConfig(**settings),
        train_dataset=Dataset.from_list(data),
        peft_config=peft_config,
    )


def trained(trainer) -> set[str]:
    """Names of the parameters that training changed; their losses must be finite."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 3 and all(0 < loss < 20 for loss in losses)
    return {name for name, x in model.named_parameters() if not x.equal(before[name])}


def test_trl_trains_what_the_assistant_says(folder, tmp_path):
    """All weights learn, the memory among them, and the loss is that of the assistant's tokens alone."""
    trainer = sft_trainer(folder, tmp_path, conversations(), assistant_only_loss=True, gradient_checkpointing=False)
    batch = next(iter(trainer.get_train_dataloader()))
    model, tokenizer = trainer.model, trainer.processing_class
    total = count = 0
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"].bool(), batch["labels"]):
        ids, said = ids[mask], labels[mask][1:] != -100
        text = tokenizer.decode(ids[1:][said])
        assert text.startswith("It is") and text.endswith(tokenizer.eos_token), "what is scored"
        with torch.no_grad():
            scores = log_softmax(model(ids[None]).logits[0, :-1], -1)
        total -= float(scores[range(len(ids) - 1), ids[1:]][said].sum())
        count += int(said.sum())
    with torch.no_grad():
        loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=torch.tensor(count))
    assert float(loss) == pytest.approx(total / count, rel=1e-4)
    names = trained(trainer)
    assert {x for x, _ in model.named_parameters() if ".memory.memories" in x} <= names
    assert "model.embed_tokens.weight" in names and any("gate.scale" in name for name in names)
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert all(x.equal(model.state_dict()[name]) for name, x in again.state_dict().items())


def test_trl_packs_documents_that_do_not_see_each_other(folder, tmp_path):
    """The loss of a packed batch is that of its documents alone, with a fresh memory and window each."""
    texts = [{"text": f"def f{i}(x):\n    return x + {i * i}  # " + "plus " * (i % 5)} for i in range(12)]
    trainer = sft_trainer(folder, tmp_path, texts, packing=True)
    batch = next(iter(trainer.get_train_dataloader()))
    (ids,), (positions,) = batch["input_ids"], batch["position_ids"]
    starts = (positions == 0).nonzero()[:, 0].tolist()
    assert len(starts) > 5, "several documents in a row"
    total = count = 0
    for start, end in zip(starts, [*starts[1:], len(ids)]):
        document = ids[start:end]
        with torch.no_grad():
            scores = log_softmax(trainer.model(document[None]).logits[0, :-1], -1)
        total -= float(scores[range(len(document) - 1), document[1:]].sum())
        count += len(document) - 1
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(count))
    assert float(loss) == pytest.approx(total / count, rel=1e-4)
    assert any(".memory." in name for name in trained(trainer))


def test_trl_trains_lora_beside_the_memory(folder, loaded, tmp_path):
    """Adapters and the memory learn, the base does not; the adapter's folder brings both back."""
    from tnt_hf.conversion import load_injected, lora_config

    model, _ = loaded
    trainer = sft_trainer(folder, tmp_path, conversations(), model=model, peft_config=lora_config(model))
    names = trained(trainer)
    assert names and all("lora_" in name or ".memory.modules_to_save." in name for name in names)
    assert any("lora_" in name for name in names) and any("memories" in name for name in names)
    trainer.save_model(str(tmp_path / "adapter"))
    again = load_injected(folder, tmp_path / "adapter")
    ids = torch.arange(1, 60)[None]
    with torch.inference_mode():
        assert again(ids).logits.equal(trainer.model.eval()(ids).logits)


# --------------------------------------------------------------------------------------- processes without the package


def quiet_environment(home: Path) -> dict[str, str]:
    """No Hub but this machine, and caches of its own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_", "HUGGINGFACE_"))}
    local = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return {**inherited, **local, "HF_HOME": str(home / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}


def run_as_stranger(home: Path, *arguments: str) -> str:
    """Runs a module that cannot import `tnt_hf`, without a network; returns what it printed."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("stranger.py"))]
    done = subprocess.run(
        [*command, sysconfig.get_paths()["purelib"], *arguments],
        env={**quiet_environment(home), "HF_HUB_OFFLINE": "1"},
        cwd=home,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["converted"], indirect=True)
def test_lm_eval_works_where_only_the_folder_is_known(folder, loaded, tmp_path):
    """The command line of lm_eval with `trust_remote_code=True` in a process that cannot import this package."""
    model, tokenizer = loaded
    arguments = [
        "--tasks",
        "tnt_choice,tnt_write",
        "--include_path",
        str(TASKS),
        "--output_path",
        str(tmp_path / "out"),
    ]
    arguments += ["--log_samples", "--device", "cpu", "--batch_size", "4"]
    model_args = f"pretrained={folder},trust_remote_code=True,dtype=float32"
    printed = run_as_stranger(tmp_path, "lm_eval", "run", "--model", "hf", "--model_args", model_args, *arguments)
    assert "|tnt_choice|" in printed
    (file,) = (tmp_path / "out").rglob("samples_tnt_choice*.jsonl")
    rows = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda row: row["doc_id"])
    for question, row in zip(QUESTIONS, rows):
        expected = [direct(model, tokenizer, question["question"], f" {choice}") for choice in question["choices"]]
        found = [float(x) for x, _ in row["filtered_resps"]]
        torch.testing.assert_close(found, [x for x, _ in expected], rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["tnt"], indirect=True)
def test_trl_works_where_only_the_folder_is_known(folder, loaded, tmp_path):
    """TRL's own script trains remote code, packed, and saves a model that says something else now."""
    model, tokenizer = loaded
    (tmp_path / "data").mkdir()
    texts = [{"text": f"def f{i}(x):\n    return x + {i * i}\n"} for i in range(12)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    arguments = ["--model_name_or_path", str(folder), "--trust_remote_code", "--dataset_name", "data", "--packing"]
    arguments += ["--max_length", "96", "--max_steps", "3", "--learning_rate", "1e-2", "--output_dir", "out"]
    run_as_stranger(tmp_path, "trl.scripts.sft", *arguments, "--use_cpu", "--bf16", "False", "--report_to", "none")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    assert (tmp_path / "out" / "modeling_tnt.py").is_file(), "the code travels on"
    ids = tokenizer(texts[3]["text"], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        assert again(ids, labels=ids).loss < model(ids, labels=ids).loss - 0.1


# ------------------------------------------------------------------------------------------------------ serve and chat


def test_commands_of_others_are_run_by_name(capsys, monkeypatch):
    """`with_tnt` hands over to the console script, with its own arguments."""
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", PreTrainedModel.from_pretrained)  # put back afterwards
    with pytest.raises(SystemExit) as end:
        with_tnt.main(["transformers", "version", "--help"])
    assert end.value.code == 0 and "version" in capsys.readouterr().out
    assert sys.argv == ["transformers", "version", "--help"]
    assert with_tnt.main([]) == 0 and "with_tnt lm_eval" in capsys.readouterr().out
    with pytest.raises(ValueError, match="'no-such-command': is not installed"):
        with_tnt.main(["no-such-command"])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """`transformers serve` in a process that knows TNT; gives its address."""
    missing = [name for name in ("fastapi", "uvicorn", "openai") if find_spec(name) is None]
    if missing:
        pytest.skip(f"transformers serve needs {', '.join(missing)}: pip install 'tnt-hf[dev]'")
    home = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tnt_hf.recipes.with_tnt", "transformers", "serve", "--device", "cpu"]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env={**quiet_environment(home), "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                ask(f"{address}/health")
                break
            except OSError:
                assert process.poll() is None, (home / "log").read_text()
                time.sleep(0.1)
        yield address, home
    finally:
        process.terminate()
        process.wait(timeout=30)


def ask(address: str, request: dict | None = None) -> dict:
    """A GET, or a POST of JSON, past any proxy."""
    body = None if request is None else json.dumps(request).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(address, body, {"Content-Type": "application/json"}), timeout=120) as got:
        return json.loads(got.read())


def answer(loaded, messages: list[dict], length: int, **settings) -> str:
    """What `generate` says to a conversation, greedily."""
    model, tokenizer = loaded
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**ids, max_new_tokens=length, do_sample=False, **settings)
    return tokenizer.decode(written[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
def test_serve_answers_as_generate_does(server, folder, loaded):
    """Over HTTP, in a conversation of three turns: the same greedy text."""
    messages = []
    for text in ("def add(a, b):", "And then?", "Go on."):
        messages.append({"role": "user", "content": text})
        request = {"model": str(folder), "messages": messages, "max_tokens": 12, "temperature": 0}
        got = ask(f"{server[0]}/v1/chat/completions", request)
        said = got["choices"][0]["message"]["content"]
        assert said == answer(loaded, messages, 12)
        assert got["usage"]["completion_tokens"] <= 12
        messages.append({"role": "assistant", "content": said})


@pytest.fixture(scope="module")
def injected(folders, tmp_path_factory):
    """A Llama with an injected memory, with which it says something else."""
    folder = tmp_path_factory.mktemp("injected")
    model = AutoModelForCausalLM.from_pretrained(folders["tnt"].parent / "llama")
    inject(model, LiZAConfig(weight=0.9, max_self_attn_length=2)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(folders["tnt"]).save_pretrained(folder)
    return folder


def test_an_injected_memory_is_loaded_with_its_model(injected, folders, monkeypatch):
    """By whatever class a tool takes; everything else is loaded as ever."""
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", PreTrainedModel.from_pretrained)  # put back afterwards
    with_tnt.load_memories_too()
    assert "config" in inspect.signature(PreTrainedModel.from_pretrained).parameters
    ids = torch.arange(2, 26)[None]
    wanted = load_injected(injected).eval()(ids).logits
    for kind in (AutoModelForCausalLM, LlamaForCausalLM):
        assert torch.equal(kind.from_pretrained(injected, revision="main").eval()(ids).logits, wanted)
        assert torch.equal(kind.from_pretrained(pretrained_model_name_or_path=injected).eval()(ids).logits, wanted)
        assert torch.equal(kind.from_pretrained(injected, attn_implementation="sdpa").eval()(ids).logits, wanted)
    plain = LlamaForCausalLM.from_pretrained(folders["tnt"].parent / "llama").eval()
    assert not hasattr(plain.config, "tnt_injection") and not torch.equal(plain(ids).logits, wanted)
    assert type(AutoModelForCausalLM.from_pretrained(folders["tnt"])) is TNTForCausalLM
    with pytest.raises(OSError):
        LlamaForCausalLM.from_pretrained(injected / "absent")


@pytest.mark.slow
def test_serve_answers_with_an_injected_memory(server, injected, folders):
    messages = [{"role": "user", "content": "def add(a, b):"}]
    tokenizer = AutoTokenizer.from_pretrained(injected)
    request = {"model": str(injected), "messages": messages, "max_tokens": 12, "temperature": 0}
    said = ask(f"{server[0]}/v1/chat/completions", request)["choices"][0]["message"]["content"]
    assert said == answer((load_injected(injected).eval(), tokenizer), messages, 12)
    base = AutoModelForCausalLM.from_pretrained(folders["tnt"].parent / "llama").eval()
    assert said != answer((base, tokenizer), messages, 12)


@pytest.mark.slow
def test_chat_shows_what_generate_says(server, folder, loaded):
    """The terminal client against that server. It renders Markdown, so the model is told to write letters only."""
    address, home = server
    letters = {loaded[1](letter)["input_ids"][0] for letter in "abcdefghijklmnopqrstuvwxyz"}
    others = [token for token in range(V) if token not in letters]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "transformers.cli.transformers", "chat", str(folder), f"{address}/v1"),
            *("max_new_tokens=12", "do_sample=False", f"suppress_tokens=[{','.join(map(str, others))}]"),
        ],
        env=quiet_environment(home),
        cwd=home,
        input="def add(a, b):\n!exit\n",
        text=True,
        capture_output=True,
        timeout=120,
    )
    expected = answer(loaded, [{"role": "user", "content": "def add(a, b):"}], 12, suppress_tokens=others)
    assert len(expected) == 12 and expected in done.stdout, done.stdout + done.stderr
