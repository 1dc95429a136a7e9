"""Which tokens of a conversation are learnt: proved on the mask, template by template."""

import json

import pytest
from tokenizers import AddedToken

from tests import tiny
from train.bad_rows import BadRowError, BadRows
from train.chat import ChatTemplate
from train.corpus import read_documents
from train.errors import TrainingError
from train.packing import encode_documents
from train.text_config import DataConfig

CHATML = """
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

LLAMA3 = """
{%- for message in messages -%}
{%- set said = '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' -%}
{%- if loop.index0 == 0 -%}{{ bos_token }}{%- endif -%}
{{ '<|start_header_id|>' + message['role'] + said }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"""

# The system message stands before the first question; only a user may begin.
MISTRAL = """
{%- if messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] + '\n\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}
{{ bos_token }}
{%- for message in turns -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate user/assistant') }}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{ '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}
{%- else -%}{{ ' ' + message['content'] + eos_token }}{%- endif -%}
{%- endfor -%}"""

# The answerer is called model; a system message is refused.
GEMMA = """
{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

# ChatML that says itself what the assistant generates.
MARKED = """
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else -%}{{ message['content'] + '<|im_end|>' + '\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

# Qwen3's way: the last answer begins with an empty thought, earlier ones lose it.
THINKING = """
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' and loop.last -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{{ message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

# No special tokens at all.
PLAIN = """
{%- for message in messages -%}{{ message['role'] + ': ' + message['content'] + '\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant:' }}{%- endif -%}"""

# template, its special tokens, what ends an answer, whether it takes a system message
TEMPLATES = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"], "{}<|im_end|>", True),
    "llama-3": (LLAMA3, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "{}<|eot_id|>", True),
    "mistral": (MISTRAL, [], " {}<eos>", True),
    "gemma": (GEMMA, ["<start_of_turn>", "<end_of_turn>"], "{}<end_of_turn>", False),
    "marked": (MARKED, ["<|im_start|>", "<|im_end|>"], "{}<|im_end|>", True),
    "plain": (PLAIN, [], " {}\n", True),
}
SYSTEM = {"role": "system", "content": "Be brief, assistant: be true."}
FIRST = [{"role": "user", "content": "What is 2 + 2?\n"}, {"role": "assistant", "content": "It is 4."}]
SECOND = [{"role": "user", "content": "It is 4. Sure?"}, {"role": "assistant", "content": "Yes,\n\nit is.  Always"}]
CONVERSATIONS = {"one turn": FIRST, "two turns": FIRST + SECOND, "three turns": FIRST + SECOND + FIRST}


def with_template(template: str, special: list[str] = ()):
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer


def learnt(tokenizer, encoded) -> list[str]:
    """The text of each run of learnt tokens."""
    runs: list[list[int]] = []
    for index, (token, target) in enumerate(zip(*encoded, strict=True)):
        if target and (index == 0 or not encoded.targets[index - 1]):
            runs.append([])
        if target:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("system", [False, True], ids=["", "system"])
@pytest.mark.parametrize("turns", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_and_their_ends_are_learnt_and_nothing_else(name, turns, system):
    template, special, ending, takes_system = TEMPLATES[name]
    tokenizer = with_template(template, special)
    messages = ([SYSTEM] if system else []) + CONVERSATIONS[turns]
    chat = ChatTemplate(tokenizer)
    if system and not takes_system:
        with pytest.raises(BadRowError, match="is refused by the chat template: System role not supported"):
            chat.encode(messages)
        return
    encoded = chat.encode(messages)
    assert learnt(tokenizer, encoded) == [ending.format(m["content"]) for m in messages if m["role"] == "assistant"]
    assert encoded.ids == tokenizer.apply_chat_template(messages)["input_ids"]
    assert chat.last_answers_only == 0


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_what_stands_before_the_last_answer(name):
    template, special, *_ = TEMPLATES[name]
    tokenizer = with_template(template, special)
    chat, messages = ChatTemplate(tokenizer), FIRST + SECOND
    ids, targets = chat.encode(messages)
    [prompt] = chat.tokenize([chat.prompt(messages)])
    assert ids[: len(prompt)] == prompt  # with the same tokens that decoding begins with
    assert targets[len(prompt)]
    assert not targets[len(prompt) - 1]


def test_marks_of_the_template_and_prefixes_agree():
    marked, chatml = (with_template(TEMPLATES[name][0], TEMPLATES[name][1]) for name in ("marked", "chatml"))
    messages = [SYSTEM, *FIRST, *SECOND]
    assert ChatTemplate(marked).encode(messages) == ChatTemplate(chatml).encode(messages)


def test_a_template_that_rewrites_earlier_turns_teaches_the_last_answer():
    tokenizer = with_template(THINKING, ["<|im_start|>", "<|im_end|>"])
    chat = ChatTemplate(tokenizer)
    assert learnt(tokenizer, chat.encode(FIRST)) == ["<think>\n\n</think>\n\nIt is 4.<|im_end|>"]
    assert chat.last_answers_only == 0
    assert learnt(tokenizer, chat.encode(FIRST + SECOND)) == ["<think>\n\n</think>\n\nYes,\n\nit is.  Always<|im_end|>"]
    assert chat.last_answers_only == 1


def test_a_token_over_the_border_belongs_to_the_answer():
    """The prompt's last character and the answer's first may be one token; no other of the prompt's is learnt."""
    tokenizer = with_template(CHATML, ["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("\nOh", normalized=False)])
    encoded = ChatTemplate(tokenizer).encode([FIRST[0], {"role": "assistant", "content": "Oh, 4."}])
    assert learnt(tokenizer, encoded) == ["\nOh, 4.<|im_end|>"]


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_a_conversation_that_is_nested_too_deep_is_refused(name):
    """It is read as JSON, but the template's values are copied by a deeper recursion."""
    chat = ChatTemplate(with_template(TEMPLATES[name][0], TEMPLATES[name][1]))
    deep = json.loads("[" * 600 + "]" * 600)
    with pytest.raises(BadRowError, match=r"^is nested too deep to be read$"):
        chat.encode([FIRST[0], {**FIRST[1], "tool_calls": deep}])


def test_templates_that_cannot_be_used():
    with pytest.raises(TrainingError, match=r"has no chat template, .* give tokenizer\.chat_template"):
        ChatTemplate(tiny.tokenizer())
    hides = "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ messages | length }}"
    with pytest.raises(TrainingError, match="which tokens are the assistant's cannot be told from this chat template"):
        ChatTemplate(with_template(hides))
    # Marks that are wrong are not trusted, where prefixes are right.
    wrong = MARKED.replace("message['role'] == 'assistant'", "message['role'] == 'user'")
    tokenizer = with_template(wrong, ["<|im_start|>", "<|im_end|>"])
    assert learnt(tokenizer, ChatTemplate(tokenizer).encode(FIRST)) == ["It is 4.<|im_end|>"]


# From rows


def conversations(tmp_path, rows: list, **settings):
    """The documents of some rows and their tokens under ChatML; and what was bad."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer, bad = with_template(CHATML, ["<|im_start|>", "<|im_end|>"]), BadRows(100)
    documents = read_documents(DataConfig(path=(str(path),), **settings), 0.05, bad)
    pairs = list(encode_documents(documents, tokenizer, ChatTemplate(tokenizer), bad))
    return pairs, [learnt(tokenizer, encoded) for _, encoded in pairs], bad.report()


def test_rows_of_messages(tmp_path):
    rows = [
        {"chat": FIRST},
        {"chat": [*FIRST, SECOND[0]]},  # nobody answers the last question
        {"chat": [FIRST[0]]},
        {"chat": "hello"},
        {"chat": [{"role": "user"}, FIRST[1]]},
        {"chat": [{"from": "human", "value": "hi"}]},
        {"chat": [FIRST[0], {"role": "assistant", "content": ""}]},  # empty: no text, no row
        {"chat": [SECOND[0], {**FIRST[1], "name": None}]},
    ]
    pairs, texts, report = conversations(tmp_path, rows, messages_column="chat")
    assert texts == [["It is 4.<|im_end|>"]] * 3
    assert report.startswith("4 unusable rows skipped: ")
    for row, reason in {
        3: "has no message of an assistant in 'chat'",
        4: "has text in 'chat', not a list of {role, content}",
        5: "has no text content in message 1 of 'chat'",
        6: "has no role in message 1 of 'chat'",
    }.items():
        assert f":{row} {reason}" in report
    groups = [document.group for document, _ in pairs]
    assert groups[0] == groups[1] != groups[2]  # the same question is held out or not, whatever follows


def test_rows_of_prompts_and_completions(tmp_path):
    rows = [{"q": "2 + 2?", "a": "4"}, {"q": [SYSTEM, FIRST[0]], "a": [FIRST[1]]}]
    columns = {"prompt_column": "q", "completion_column": "a"}
    _, texts, _ = conversations(tmp_path, rows, **columns)
    assert texts == [["4<|im_end|>"], ["It is 4.<|im_end|>"]]
    [(document, encoded)], texts, report = conversations(tmp_path, rows, as_chat=False, **columns)
    assert texts == [["4<eos>"]]
    assert (document.text, document.group) == ("2 + 2?4", "2 + 2?")
    assert encoded.ids[:-2] == tiny.tokenizer()("2 + 2?")["input_ids"]
    assert ":2 has list in 'q', not text" in report
