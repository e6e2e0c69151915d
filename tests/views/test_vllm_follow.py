"""A running vLLM engine takes the versions of a publisher: its tokens are those of transformers,
and of a fresh engine. See `make vllm`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from paths import CHILDREN

import shardckpt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM has an environment of its own: run `make vllm`"
    ),
]
ENVIRONMENT = {
    **os.environ,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
NAMED = {"include": "model/**", "strip_prefix": "model/"}
PROMPTS = (["three", "seven", "one"], ["nine"])


class Training:
    """A model that changes in each step, and its publisher."""

    def __init__(self, where):
        import torch
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        torch.manual_seed(0)
        sizes = {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        }
        self.model = LlamaForCausalLM(
            LlamaConfig(**sizes, vocab_size=1024, max_position_embeddings=64)
        ).eval()
        for parameter in self.model.parameters():
            parameter.data.mul_(3)  # so that the next token depends on those before
        self.words = [
            "zero",
            "one",
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            *(f"w{n}" for n in range(1014)),
        ]
        tokenizer = Tokenizer(
            WordLevel({word: i for i, word in enumerate(self.words)}, unk_token="zero")
        )
        tokenizer.pre_tokenizer = Whitespace()
        self.start = where / "start"
        """The model as it was before the first version, as Hugging Face's library saves it."""
        self.model.save_pretrained(self.start)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="zero").save_pretrained(
            self.start
        )
        self.url = where / "policy"
        self.publisher = shardckpt.Publisher(self.url, anchor_every=6)

    def publish(self, step):
        """Change the model, and publish it; return the tokens that transformers generates with
        it."""
        import torch

        torch.manual_seed(step)
        for parameter in self.model.parameters():
            parameter.data += (
                0.3
                * parameter.data.std()
                * torch.randn_like(parameter)
                * (torch.rand_like(parameter) < 0.2)
            )
        self.publisher.publish(step, {"model": self.model.state_dict(), "step": step})
        self.publisher.wait()
        return self.tokens()

    def tokens(self):
        import torch

        made = []
        for prompt in PROMPTS:
            ids = [self.words.index(word) for word in prompt]
            for _ in range(16):
                ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
            made.append(ids[len(prompt) :])
        return made


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    made = Training(tmp_path_factory.mktemp("training"))
    with made.publisher:
        yield made


class Engine:
    """A vLLM engine in processes of its own."""

    def __init__(self, training, ranks):
        threads = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if ranks == 2 else {}
        command = [
            sys.executable,
            str(CHILDREN / "vllm_follow.py"),
            str(training.start),
            str(training.url),
        ]
        options = json.dumps({"tensor_parallel_size": ranks})
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        self.process = subprocess.Popen(
            [*command, options], env={**ENVIRONMENT, **threads}, start_new_session=True, **pipes
        )
        self.log = []
        try:
            assert self.answer() == {"ready": True}
        except BaseException:
            self.kill()
            raise

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
            self.log.append(line)
        raise AssertionError("".join(self.log[-60:]))

    def send(self, command):
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def ask(self, command):
        self.send(command)
        return self.answer()

    def kill(self):
        """Kill all of its processes with SIGKILL."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)
        self.process.stdin.close()
        self.process.stdout.close()


def fresh(training, step, ranks):
    """The tokens of a new engine on a version."""
    command = [sys.executable, str(CHILDREN / "vllm_generate.py"), str(training.start)]
    options = {
        "tensor_parallel_size": ranks,
        "load_format": "shardckpt",
        "model_loader_extra_config": {"url": f"{training.url}/{step}", **NAMED},
    }
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if ranks == 2 else {}
    done = subprocess.run(
        [*command, json.dumps(options)],
        env={**ENVIRONMENT, **threads},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        one[0]
        for one in json.loads(
            next(line for line in done.stdout.splitlines() if line.startswith("[["))
        )
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_ten_versions_in_a_row_give_the_tokens_that_transformers_gives(training, ranks):
    engine = Engine(training, ranks)
    try:
        before = engine.ask("tokens")
        seen = [before["tokens"]]
        for step in range(100 * ranks, 100 * ranks + 10):
            expected = training.publish(step)
            prepared = engine.ask("prepare")  # the engine serves with the version that it has
            assert prepared["prepared"] == [step] * ranks
            assert prepared["tokens"] == seen[-1]
            answer = engine.ask("next")
            assert "error" not in answer, answer["error"] + "".join(engine.log[-60:])
            assert (answer["step"], answer["weight_version"]) == (step, str(step))
            assert answer["tokens"] == expected, step
            for proof in answer["proofs"]:
                assert (proof["step"], len(proof["proved"]), proof["not_proved"]) == (step, 21, [])
            seen.append(answer["tokens"])
        assert len({json.dumps(tokens) for tokens in seen}) == len(seen), (
            "each version has other tokens"
        )
        assert engine.ask("next")["step"] is None
    finally:
        engine.kill()


@pytest.mark.parametrize("ranks", [1, 2])
def test_these_tokens_are_those_of_a_fresh_engine(training, ranks):
    expected = training.publish(300 + ranks)
    assert fresh(training, 300 + ranks, ranks) == expected


def test_an_engine_that_is_killed_amid_a_version_leaves_the_next_one_what_it_needs(training):
    training.publish(500)
    engine = Engine(training, 1)
    try:
        assert engine.ask("next")["step"] == 500
        training.publish(501)
        engine.send("next")
    finally:
        engine.kill()
    expected = training.publish(502)
    engine = Engine(training, 1)
    try:
        answer = engine.ask("next")
        assert (answer["step"], answer["tokens"]) == (502, expected)
    finally:
        engine.kill()


def test_what_cannot_be_followed_is_refused_and_leaves_the_engine_as_it_is(training, tmp_path):
    training.publish(600)
    bare = SimpleNamespace(start=training.start, url=tmp_path / "bare")
    with shardckpt.Publisher(bare.url) as publisher:
        state = {
            f"model/{name}": tensor
            for name, tensor in training.model.state_dict().items()
            if "q_proj" not in name
        }
        publisher.publish(
            1, {"model": {name.removeprefix("model/"): tensor for name, tensor in state.items()}}
        )
    engine = Engine(bare, 1)
    try:
        before = engine.ask("tokens")["tokens"]
        answer = engine.ask("next")
        assert "qkv_proj" in answer["error"] + "".join(engine.log), answer
        assert answer["tokens"] == before
    finally:
        engine.kill()


@pytest.mark.parametrize("moment", ["always", "after the rehearsal"])
def test_a_model_that_changes_a_tensor_in_place_is_loaded_once(tmp_path, moment):
    """VLLM counts what a layer is given: a second call left memory that nobody had filled."""
    done = subprocess.run(
        [sys.executable, str(CHILDREN / "vllm_in_place.py"), str(tmp_path), moment],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    if moment == "always":
        assert answer == {"p": [1] * 8, "q": [2] * 8, "r": [6] * 8}
    else:
        assert "did not in the rehearsal; start vLLM again" in answer[0]
        assert "an earlier update failed while it changed" in answer[1]


def test_quantised_models_are_refused_by_name():
    from shardckpt.views.vllm_follow import FollowEngine, FollowInit

    quantised = SimpleNamespace(quantization="fp8")
    engine = FollowEngine(
        None, SimpleNamespace(parallel_config=None, model_config=quantised), "cpu", None
    )
    with pytest.raises(
        shardckpt.errors.OptionError,
        match="policy: shardckpt does not load quantised models, and this one is fp8",
    ):
        engine.init_transfer_engine(FollowInit("policy"))
