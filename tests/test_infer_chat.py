"""`chat`: a kept cache changes nothing but the work, whatever interrupts it."""

import io
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from infer.command import main
from infer.conversation import Conversation
from infer.loading import Loaded
from infer.options import DecodingOptions
from infer.terminal import Terminal
from layerskip.checkpoint.settings import Setting
from layerskip.model.stages import Stages
from tests import tiny

TEMPLATE = (
    "{% for message in messages %}<bos>{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)
SETTING = Setting(2, 3)
TURNS = ("def add(a", "the quick brown", "lazy dog")


def loaded(template: str | None = None, **config) -> Loaded:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    model = tiny.endless(tiny.llama(vocab_size=len(tokenizer), **config))
    return Loaded("tiny", model, tokenizer)


def conversation(template: str | None = None, setting: Setting = SETTING, **config) -> Conversation:
    return Conversation(loaded(template, **config), setting, DecodingOptions(max_new_tokens=12))


def answer(talk: Conversation, text: str) -> list[int]:
    return [token for piece in talk.answer(text) if piece.step for token in piece.step.tokens[0].tolist()]


def fresh(talk: Conversation, prompt: list[int]) -> list[int]:
    """What plain decoding says to a prompt without any cache."""
    ids = torch.tensor([prompt])
    output = talk.loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


@pytest.fixture
def prefilled(monkeypatch) -> list[int]:
    """Positions of every prefill, as they come."""
    lengths: list[int] = []
    prefill = Stages.prefill

    def watched(self, token_ids, cache):
        lengths.append(token_ids.shape[1])
        prefill(self, token_ids, cache)

    monkeypatch.setattr(Stages, "prefill", watched)
    return lengths


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("setting", [Setting(2, 3), Setting(None, 0)])
def test_every_answer_is_that_of_a_fresh_run_on_the_whole_conversation(template, setting):
    talk = conversation(template, setting)
    for text in TURNS:
        prompt = talk.prompt_ids(text)
        assert answer(talk, text) == fresh(talk, prompt)


def test_only_new_positions_are_prefilled(prefilled):
    talk = conversation()
    known = 0
    for text in TURNS:
        prompt = talk.prompt_ids(text)
        answer(talk, text)
        # The root, the prompt's last token, goes through the first round; all else that is not known is prefilled.
        assert prefilled.pop() == len(prompt) - 1 - known
        assert not prefilled
        known = len(prompt) + 12 - 1  # all committed tokens but the last


def test_a_reset_keeps_what_the_next_conversation_shares(prefilled):
    talk = Conversation(loaded(TEMPLATE), Setting(2, 3), DecodingOptions(max_new_tokens=12), system="lazy dog " * 9)
    answer(talk, TURNS[0])
    talk.reset()
    prompt = talk.prompt_ids(TURNS[1])
    assert answer(talk, TURNS[1]) == fresh(talk, prompt)
    assert talk.prefilled < 30 < len(prompt)
    assert prefilled[1] == talk.prefilled - 1


def test_an_answer_closed_early_is_remembered_as_far_as_it_was_shown():
    talk = conversation()
    with closing(talk.answer(TURNS[0])) as pieces:
        shown = [token for _ in range(2) for token in next(pieces).step.tokens[0].tolist()]
    prompt = talk.prompt_ids(TURNS[1])
    assert prompt[: len(talk.loaded.tokenizer(TURNS[0])["input_ids"]) + len(shown)][-len(shown) :] == shown
    assert answer(talk, TURNS[1]) == fresh(talk, prompt)


@pytest.mark.parametrize("call", [1, 2, 3, 5, 8])
def test_an_interrupt_between_two_layers_leaves_a_usable_cache(call):
    """Ctrl-C may come while some layers hold more positions than others."""
    talk = conversation()
    answer(talk, TURNS[0])
    calls = 0

    def interrupt(layer, args, output):
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt

    handle = talk.loaded.model.model.layers[2].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        answer(talk, TURNS[1])
    handle.remove()
    prompt = talk.prompt_ids(TURNS[2])
    assert answer(talk, TURNS[2]) == fresh(talk, prompt)


def test_a_turn_without_an_answer_is_as_if_it_had_not_been_said():
    talk = conversation()
    before = talk.prompt_ids(TURNS[0])
    talk.loaded.model.model.layers[0].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        answer(talk, "never mind")
    assert talk.prompt_ids(TURNS[0]) == before


def test_an_end_token_does_not_stand_between_turns():
    talk = conversation()
    first = answer(talk, TURNS[0])
    again = conversation()
    again.loaded.model.generation_config.eos_token_id = [first[4], 299]
    cut = answer(again, TURNS[0])
    assert cut == first[: first.index(first[4]) + 1]
    end = again.prompt_ids("")
    assert end[: len(end) - 1][-len(cut) + 1 :] == cut[:-1]  # "\n" follows the text before the end


def test_a_conversation_that_fills_the_model_is_cut_and_then_refused():
    from infer.errors import InputError

    talk = conversation(max_position_embeddings=24)
    assert len(answer(talk, "a" * 20)) == 4
    with pytest.raises(InputError, match="the model 24 positions: say less, or /reset"):
        answer(talk, "b")
    talk.reset()
    assert len(answer(talk, "b")) == 12


def dialogue(folder, text: str, monkeypatch, capsys, *flags: str) -> tuple[str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["chat", str(folder), "--exit-layer", "2", "--max-new-tokens", "8", *flags]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_commands(tiny_checkpoint, monkeypatch, capsys):
    lines = "/stats\nlazy dog\n/stats\n/sing now\n/color\n/color\n\n/reset\nlazy dog\n/help\n/quit\nnever said\n"
    out, err = dialogue(tiny_checkpoint, lines, monkeypatch, capsys)
    length = len(out) // 2
    assert out[:length] == out[length:]  # the same answer after a reset
    assert err.count("no chat template") == 1
    for said in ("no answer yet", "last answer: ", "all answers: ", "unknown command /sing", "/quit"):
        assert said in err


def test_the_end_of_input_leaves(tiny_checkpoint, monkeypatch, capsys):
    out, _ = dialogue(tiny_checkpoint, "lazy dog", monkeypatch, capsys)
    assert out.endswith("\n")


def test_ctrl_c_stops_the_answer_and_not_the_chat(tiny_checkpoint, monkeypatch, capsys):
    write, calls = Terminal.write, 0

    def interrupted(self, text, drafted=False):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        write(self, text, drafted)

    monkeypatch.setattr(Terminal, "write", interrupted)
    _, err = dialogue(tiny_checkpoint, "lazy dog\ndef add\n/stats\n", monkeypatch, capsys)
    assert err.count("(stopped)") == 1
    assert "last answer: 8 tokens" in err


def test_a_real_ctrl_c(tiny_checkpoint):
    """The signal itself, in the middle of a long answer, to a process that reads from a pipe."""
    command = [sys.executable, "-m", "infer", "chat", str(tiny_checkpoint), "--exit-layer", "2"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "200", "--temperature", "1", "--seed", "3"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    process.stdin.write(b"lazy dog\n")
    process.stdin.flush()
    process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(b"/stats\n", timeout=60)
    assert process.returncode == 0, err
    assert b"all answers: " in err
    assert b"Traceback" not in err


def test_a_line_that_is_not_utf_8_is_told_and_skipped(tiny_checkpoint):
    command = [sys.executable, "-m", "infer", "chat", str(tiny_checkpoint), "--max-new-tokens", "4"]
    result = subprocess.run(
        command, cwd=Path(__file__).resolve().parents[1], input=b"\xff\xfe\nhello\n", capture_output=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert b"not UTF-8" in result.stderr


@pytest.mark.parametrize("drafting", [{"tree": (3, 2)}, {"tree": "s3_k2_d4"}, {"lookup": "branch"}])
def test_a_kept_cache_changes_nothing_however_it_is_drafted(drafting):
    talk = conversation(TEMPLATE, setting=Setting(2, 3, **drafting))
    for text in TURNS:
        prompt = talk.prompt_ids(text)
        assert answer(talk, text) == fresh(talk, prompt)
