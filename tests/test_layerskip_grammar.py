"""Structured output: masks are a function of the prefix, speculation keeps them exact, faults have a place."""

import importlib
import json
import random
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LogitsProcessorList, PreTrainedTokenizerFast

import layerskip
from layerskip.grammar import states as grammar_states
from layerskip.grammar.processor import Grammar
from tests import tiny
from tests.distributions import chi_square_p_value

pytest.importorskip("llguidance")

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "user"]},
        "tags": {"type": "array", "items": {"enum": ["x", "lazy dog"]}, "minItems": 1, "maxItems": 3},
        "in": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "role", "tags", "in"],
    "additionalProperties": False,
}
REGEX = r"(the quick|a lazy) (fox|dog)[0-9]{2,4}!?"
LARK = """
start: sum
sum: term ("+" term){0,3}
term: NUMBER | "(" NUMBER "-" NUMBER ")"
NUMBER: /[1-9][0-9]{0,2}/
"""


def check_json(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "role", "tags", "in"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 4
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 150
    assert value["role"] in ("admin", "user")
    assert 1 <= len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"x", "lazy dog"}
    assert list(value["in"]) == ["ok"]
    assert type(value["in"]["ok"]) is bool


def check_regex(text: str) -> None:
    assert re.fullmatch(REGEX, text)


def check_lark(text: str) -> None:
    assert re.fullmatch(r"(N|\(N-N\))(\+(N|\(N-N\))){0,3}".replace("N", "[1-9][0-9]{0,2}"), text)


MAKERS = {
    "json": (Grammar.from_json_schema, SCHEMA, check_json),
    "regex": (Grammar.from_regex, REGEX, check_regex),
    "lark": (Grammar.from_lark, LARK, check_lark),
}


@pytest.fixture(params=MAKERS)
def language(request, tokenizer):
    """A grammar, and the check of its texts."""
    make, text, check = MAKERS[request.param]
    return make(text, tokenizer), check


@pytest.fixture(scope="module")
def model():
    """Twenty logits more than the tokenizer has tokens."""
    return tiny.llama(vocab_size=tiny.tokenizer().vocab_size + 20)


def allowed(processor, row: list[int], vocab: int = 300) -> list[int]:
    scores = processor(torch.tensor([row]), torch.zeros(1, vocab))
    assert set(scores.unique().tolist()) <= {0.0, -torch.inf}
    return (scores[0] == 0).nonzero().flatten().tolist()


def written(tokenizer, output: torch.Tensor, prompt: torch.Tensor) -> str:
    return tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)


def prompt_of(tokenizer, seed: int) -> torch.Tensor:
    return torch.randint(3, tokenizer.vocab_size, (1, 5), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("exit_layer", [1, 2, 3])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4, 5])
def test_greedy_equals_plain_constrained_decoding(exit_layer, num_draft_tokens, language, model, tokenizer):
    grammar, check = language
    prompt = prompt_of(tokenizer, seed=10 * exit_layer + num_draft_tokens)
    processors = LogitsProcessorList([grammar.processor(prompt.shape[1])])
    arguments = {"do_sample": False, "max_new_tokens": 150, "logits_processor": processors}
    expected = model.generate(prompt, **arguments)
    actual = layerskip.generate(model, prompt, exit_layer=exit_layer, num_draft_tokens=num_draft_tokens, **arguments)
    assert torch.equal(actual, expected)
    assert actual[0, -1] == EOS
    check(written(tokenizer, actual, prompt))


WAYS = {
    "chain": {"exit_layer": 2},
    "plain": {"exit_layer": None},
    "tree": {"exit_layer": 1, "tree": (2, 2)},
    "lookup": {"exit_layer": 3, "lookup": "hybrid"},
}


@pytest.mark.parametrize("way", WAYS)
def test_generate_takes_a_grammar_and_drafts_what_it_forces(way, language, model, tokenizer):
    grammar, check = language
    inputs = tokenizer(["def add", "the quick brown fox"], return_tensors="pt", padding=True, padding_side="left")
    length = inputs.input_ids.shape[1]
    arguments = {**inputs, "do_sample": False, "max_new_tokens": 100}
    arguments.pop("token_type_ids", None)
    expected = model.generate(**arguments, logits_processor=[grammar.processor(length)])
    actual = layerskip.generate(model, **arguments, **WAYS[way], grammar=grammar)
    assert torch.equal(actual, expected)
    for text in tokenizer.batch_decode(actual[:, length:], skip_special_tokens=True):
        check(text)


def test_a_constant_takes_one_step(model, tokenizer):
    grammar = Grammar.from_json_schema({"const": "dog"}, tokenizer)
    prompt = prompt_of(tokenizer, seed=0)
    (step,) = layerskip.steps(model, prompt, exit_layer=2, max_new_tokens=50, do_sample=False, grammar=grammar)
    assert tokenizer.decode(step.tokens[0]) == '"dog"<eos>'


@pytest.mark.parametrize("seed", range(5))
def test_samples_are_texts_of_the_grammar(seed, language, model, tokenizer):
    grammar, check = language
    prompt = prompt_of(tokenizer, seed)
    output = layerskip.generate(
        model,
        prompt,
        exit_layer=seed % 3 + 1,
        num_draft_tokens=seed + 1,
        do_sample=True,
        temperature=3.0,
        top_k=20,
        max_new_tokens=200,
        logits_processor=[grammar.processor(prompt.shape[1])],
    )
    assert output[0, -1] == EOS
    check(written(tokenizer, output, prompt))
    assert grammar.accepts(output[0, prompt.shape[1] :].tolist())


@pytest.mark.parametrize("given_as", ["processor", "grammar"])
def test_sampled_texts_have_plain_constrained_decodings_distribution(given_as, tokenizer):
    model = tiny.llama(vocab_size=320, seed=3)
    grammar = Grammar.from_regex("(a|b|ox){1,2}c?", tokenizer)
    prompt = prompt_of(tokenizer, seed=0)
    expected = enumerate_outputs(model, prompt, grammar)
    assert abs(sum(expected.values()) - 1) < 1e-5
    assert len(expected) > 10
    samples = []
    for seed in range(5):
        torch.manual_seed(seed)
        outputs = layerskip.generate(
            model,
            prompt.expand(100, -1),
            exit_layer=2,
            num_draft_tokens=3,
            tree=None if given_as == "processor" else (2, 1),
            do_sample=True,
            temperature=4.0,
            top_k=0,
            max_new_tokens=10,
            **{"grammar": grammar} if given_as == "grammar" else {"logits_processor": [grammar.processor(5)]},
        )
        samples += [tuple(output[: output.index(EOS) + 1]) for output in outputs[:, 5:].tolist()]
    assert chi_square_p_value(samples, expected) > 1e-4
    other = enumerate_outputs(model, prompt, grammar, temperature=1.0)
    assert chi_square_p_value(samples, other) < 1e-4  # it could fail


@torch.no_grad()
def enumerate_outputs(model, prompt, grammar, temperature: float = 4.0) -> dict[tuple[int, ...], float]:
    """The probability of every output, from whole forward passes and a new processor at every position."""
    found, open_ = {}, {(): 1.0}
    while open_:
        output, probability = open_.popitem()
        ids = torch.cat([prompt, torch.tensor([output], dtype=torch.long).view(1, -1)], dim=1)
        scores = grammar.processor(prompt.shape[1])(ids, model(ids).logits[:, -1].float())
        for token in (scores[0] > -torch.inf).nonzero().flatten().tolist():
            longer = (*output, token)
            p = probability * float((scores[0] / temperature).softmax(-1)[token])
            (found if token == EOS else open_)[longer] = p
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_mask_is_a_function_of_the_prefix(seed, language, monkeypatch):
    """Asked in any order: longer, rolled back, siblings, several rows; few states, so that rows share them."""
    grammar, _ = language
    monkeypatch.setattr(grammar_states, "_MAX_STATES", 2)
    monkeypatch.setattr(grammar_states, "_MAX_UNDO", 1 + seed)
    draw, prompt = random.Random(seed), [9, 9]
    processor, rows = grammar.processor(2), [[], [], []]
    for _ in range(60):
        row = draw.choice(rows)
        if draw.random() < 0.3:
            del row[max(0, len(row) - draw.randint(1, 7)) :]
        choices = allowed(grammar.processor(2), prompt + row)
        assert allowed(processor, prompt + row) == choices
        sibling = draw.randrange(300)
        assert allowed(processor, [*prompt, *row, sibling]) == allowed(grammar.processor(2), [*prompt, *row, sibling])
        if choices != [EOS]:
            row.append(draw.choice([token for token in choices if token != EOS]))


def test_rows_are_masked_together_as_apart(language):
    grammar, _ = language
    rows = torch.randint(3, 300, (4, 6))
    rows[:, 5] = torch.tensor(allowed(grammar.processor(5), rows[0, :5].tolist()))[:1]
    scores = torch.randn(4, 320)
    together = grammar.processor(5)(rows, scores)
    apart = [grammar.processor(5)(rows[i : i + 1], scores[i : i + 1]) for i in range(4)]
    assert torch.equal(together, torch.cat(apart))
    assert (together[:, :300] > -torch.inf).any(dim=1).all()
    assert (together[:, 300:] == -torch.inf).all()  # no such tokens


def test_a_batch_with_padding_is_constrained_row_by_row(language, model, tokenizer):
    grammar, check = language
    inputs = tokenizer(["def add", "the quick brown fox"], return_tensors="pt", padding=True, padding_side="left")
    length = inputs.input_ids.shape[1]
    output = model.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        do_sample=False,
        max_new_tokens=150,
        logits_processor=[grammar.processor(length)],
    )
    for text in tokenizer.batch_decode(output[:, length:], skip_special_tokens=True):
        check(text)


def test_end_of_sequence_is_allowed_exactly_where_a_text_may_end(tokenizer):
    grammar = Grammar.from_regex("ab?", tokenizer)
    processor = grammar.processor(1)
    a, b = tokenizer("ab")["input_ids"]
    assert allowed(processor, [7]) == [a]
    assert allowed(processor, [7, a]) == [EOS, b]
    assert allowed(processor, [7, a, b]) == [EOS]
    assert [grammar.accepts(output) for output in ([], [a], [a, b], [a, EOS, b], [b], [EOS])] == [
        *(False, True, True, True, False, False)
    ]


def test_nothing_follows_an_end_or_a_prefix_that_no_text_begins_with(tokenizer):
    processor = Grammar.from_regex("ab+", tokenizer).processor(0)
    a, b = tokenizer("ab")["input_ids"]
    for prefix in ([a, b, EOS], [a, b, EOS, 50, 60], [EOS], [b], [a, a], [a, b, a, b]):
        assert allowed(processor, prefix) == [EOS]
        assert allowed(processor, [a, b]) == [EOS, b]  # and the next question is answered all the same


def test_several_ends_of_sequence(tokenizer):
    processor = Grammar.from_regex("a", tokenizer, eos_token_id=[EOS, 5]).processor(0)
    (a,) = tokenizer("a")["input_ids"]
    assert allowed(processor, [a]) == [EOS, 5]
    assert allowed(processor, [a, 5, 60]) == [EOS, 5]


def test_forced_tokens_are_the_only_ones_allowed(language):
    grammar, _ = language
    draw, processor, seen = random.Random(0), grammar.processor(3), 0
    for _ in range(5):
        row = [8, 8, 8]
        seen += write_with_forced(grammar, processor, row, draw)
        assert processor.forced(row, limit=4) == []  # it has ended
    assert seen > 0


def write_with_forced(grammar, processor, row: list[int], draw: random.Random) -> int:
    """Extend `row` to its end, with random tokens where there is a choice; returns how many were forced."""
    seen = 0
    while row[-1] != EOS:
        forced = processor.forced(row, limit=4)
        assert len(forced) <= 4
        assert processor.forced(row, limit=1) == forced[:1]
        for token in forced:
            assert allowed(grammar.processor(3), row) == [token]
            row.append(token)
        seen += len(forced)
        if len(forced) < 4 and row[-1] != EOS:
            choices = allowed(grammar.processor(3), row)
            assert len(choices) > 1
            row.append(draw.choice(choices))
    return seen


def test_a_constant_is_forced_to_its_end(tokenizer):
    processor = Grammar.from_json_schema({"const": "lazy dog"}, tokenizer).processor(1)
    forced = processor.forced([9], limit=50)
    assert tokenizer.decode(forced) == '"lazy dog"<eos>'
    assert processor.forced([9, *forced], limit=50) == []


def test_json_stands_on_one_line_unless_the_schema_says_otherwise(tokenizer):
    schema = {"type": "array", "items": {"type": "integer"}}
    grammar = Grammar.from_json_schema(schema, tokenizer)
    free = Grammar.from_json_schema({**schema, "x-guidance": {"whitespace_flexible": True}}, tokenizer)
    ids = {text: tokenizer(text)["input_ids"] for text in ("[1,2]", "[1, 2]", "[1,  2]", "[\n  1,\n  2\n]")}
    assert [grammar.accepts(tokens) for tokens in ids.values()] == [True, True, False, False]
    assert all(free.accepts(tokens) for tokens in ids.values())


def test_a_schema_may_be_its_text(tokenizer):
    grammar = Grammar.from_json_schema('{"enum": ["a", "b"]}', tokenizer)
    assert grammar.accepts(tokenizer('"a"')["input_ids"])
    assert not grammar.accepts(tokenizer('"c"')["input_ids"])


def test_anchors_say_what_is_so_anyway(tokenizer):
    grammar = Grammar.from_regex("^ab$", tokenizer)
    assert grammar.accepts(tokenizer("ab")["input_ids"])
    assert not grammar.accepts(tokenizer("abab")["input_ids"])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"type": "object",}', "Expecting property name .* at line 1, column 19"),
        ({"properties": {"age": {"type": "bogus"}}}, "Invalid type: bogus .at #/properties/age"),
        (
            {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "a("}]}},
            "unclosed group .* #/items/anyOf/1",
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, r"Unimplemented keys: ..not.. .at #/\$defs/a"),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 1}},
                "required": ["a"],
            },
            "minimum .5. is greater than maximum .1. .at #/properties/a",
        ),
        ("[1]", "is an object, got .1."),
        ({"enum": [object()]}, "cannot be written as JSON"),
    ],
)
def test_a_bad_schema_is_told_with_its_place(schema, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        Grammar.from_json_schema(schema, tokenizer)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("x(ab", "'x.ab' cannot be used: unclosed group at character 2$"),
        (r"a\b", r"lookarounds not supported yet; WordUnicode in regex /a\\b/$"),
        ("(?=a)", "look-around, .* at character 1$"),
    ],
)
def test_a_bad_regex_is_told_with_its_place(pattern, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        Grammar.from_regex(pattern, tokenizer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('start: a\na: foo "b"', r"unknown name: .foo. \(line 2, column 4\)$"),
        ("start: a\na: /x(/", r"unclosed group at character 2 \(line 2, column 4\)$"),
        ('begin: "a"', "no start rule found$"),
    ],
)
def test_a_bad_lark_grammar_is_told_with_its_place(text, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        Grammar.from_lark(text, tokenizer)


def test_tokenizers_that_cannot_be_used(tokenizer):
    class Slow:
        eos_token_id = EOS

        def __len__(self) -> int:
            return 300

    with pytest.raises(ValueError, match="needs a fast tokenizer, got Slow"):
        Grammar.from_regex("a", Slow())
    with pytest.raises(ValueError, match="eos_token_id 300 is not one of the tokenizer's 300 tokens"):
        Grammar.from_regex("a", tokenizer, eos_token_id=[EOS, 300])
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match=r"no eos_token .* give eos_token_id="):
        Grammar.from_regex("a", endless)
    assert Grammar.from_regex("a", endless, eos_token_id=EOS).eos_token_ids == (EOS,)


def test_a_prefix_shorter_than_the_prompt_is_refused(tokenizer):
    with pytest.raises(ValueError, match="has 3 tokens but the grammar begins after 4"):
        allowed(Grammar.from_regex("a", tokenizer).processor(4), [5, 5, 5])


def test_a_model_that_lacks_the_tokens_is_refused(tokenizer):
    processor = Grammar.from_regex("a", tokenizer).processor(0)
    (a,) = tokenizer("a")["input_ids"]
    assert allowed(processor, [], vocab=a + 1) == [a]
    with pytest.raises(ValueError, match=f"the model has {a} logits"):
        allowed(processor, [], vocab=a)


def test_a_grammar_that_the_tokenizer_cannot_write_is_told():
    letters = Tokenizer(models.BPE(vocab={"<eos>": 0, "a": 1, "b": 2}, merges=[]))
    endings = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<eos>")
    with pytest.raises(ValueError, match="llguidance cannot read this tokenizer"):
        Grammar.from_regex("a", endings)
    letters.decoder = decoders.ByteLevel()
    processor = Grammar.from_regex(
        "a(x|y)", PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<eos>")
    ).processor(0)
    assert processor.forced([], limit=1) == [1]
    for _ in range(2):  # the failed state is not kept
        with pytest.raises(RuntimeError, match="cannot go on after 'a'"):
            processor.forced([1], limit=1)
    assert processor.forced([], limit=1) == [1]


def test_added_tokens_are_seen():
    tokenizer = tiny.tokenizer()
    assert Grammar.from_regex("zebra", tokenizer).processor(0).forced([], limit=9)
    tokenizer.add_tokens(["zebra"])
    assert Grammar.from_regex("zebra", tokenizer).processor(0).forced([], limit=9) == [300, EOS]


def test_without_llguidance_the_way_out_is_named(monkeypatch, tokenizer):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    for make, text, _ in MAKERS.values():
        with pytest.raises(ImportError, match=r"pip install 'layerskip-kit\[grammar\]'"):
            make(text, tokenizer)
