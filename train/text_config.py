"""The section `data`: one source of text, or a mixture of them, and how it is cut into blocks."""

from dataclasses import dataclass, fields

from train.errors import check, check_above_zero, check_at_least


@dataclass(frozen=True)
class SourceConfig:
    """One source of text. Its keys stand in `data` itself, or in each item of the list `data.sources`."""

    standard_library: bool = False  # the running Python's own standard library sources: no download
    path: tuple[str, ...] = ()  # files or globs: .txt, .md, .py (a document each), .jsonl, .csv, .tsv, .parquet (rows)
    dataset: str | None = None  # Hub id or local folder for datasets.load_dataset
    subset: str | None = None  # configuration name of the Hub dataset
    split: str = "train"  # split of the Hub dataset that is cut into training and held-out text
    eval_path: tuple[str, ...] = ()  # files of held-out text: then all of `path` is trained on
    eval_split: str | None = None  # split of the Hub dataset to hold out: then all of `split` is trained on
    streaming: bool | None = None  # read a Hub dataset without downloading it whole; left out, if max_documents is set
    text_column: str = "text"  # column (key of a .jsonl line) that holds the text
    messages_column: str | None = None  # column of conversations, lists of {role, content}: answers alone are learnt
    prompt_column: str | None = None  # column of prompts, with completion_column: completions alone are learnt
    completion_column: str | None = None  # column of what follows the prompt; only regenerate does without
    as_chat: bool = True  # prompt and completion are a user's and an assistant's turn; false: joined as they are
    group_column: str | None = None  # column that names what a row belongs to: rows of a group are held out together
    max_documents: int | None = None  # use only this many documents
    weight: float = 1.0  # share of the blocks that training reads, relative to the other sources'

    def __post_init__(self) -> None:
        self.check_source("data.sources")  # `data` itself checks on its own

    @property
    def is_chat(self) -> bool:
        """Whether rows go through the tokenizer's chat template."""
        return self.messages_column is not None or (self.prompt_column is not None and self.as_chat)

    @property
    def has_answers(self) -> bool:
        """Whether a row is a prompt and its answer, of which the answer alone is learnt."""
        return self.messages_column is not None or self.prompt_column is not None

    @property
    def columns(self) -> dict[str, str]:
        """The columns that every row must have, by the setting that names them."""
        wanted = {name: getattr(self, name) for name in ("messages_column", "prompt_column", "completion_column")}
        found = {name: column for name, column in wanted.items() if column is not None} or {
            "text_column": self.text_column
        }
        return found | ({"group_column": self.group_column} if self.group_column else {})

    def check_source(self, section: str) -> None:
        """Raise `ConfigError` unless the keys fit together."""
        given = self.standard_library + bool(self.path) + (self.dataset is not None)
        check(given == 1, f"{section}: give exactly one of standard_library, path and dataset; {given} are given")
        check_at_least(section, self, {"max_documents": 3})
        check_above_zero(section, self, "weight")
        pair = self.prompt_column is not None, self.completion_column is not None
        check(pair != (False, True), f"{section}: completion_column goes with prompt_column; give both")
        check(
            self.messages_column is None or not any(pair),
            f"{section}: messages_column and prompt_column exclude each other: give one",
        )
        check(
            not (self.standard_library and (self.has_answers or self.group_column)),
            f"{section}: standard_library has no columns; leave out {', '.join(self.columns)}",
        )
        check(not self.eval_path or bool(self.path), f"{section}.eval_path goes with path; for a dataset: eval_split")
        check(
            self.eval_split is None or self.dataset is not None,
            f"{section}.eval_split goes with dataset; for files: eval_path",
        )
        check(
            self.eval_split is None or self.eval_split != self.split,
            f"{section}.eval_split is {self.eval_split!r}, the split that is trained on; name another, or leave it out",
        )


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """The text: one source (exactly one of `standard_library`, `path` and `dataset`), or a list of them."""

    sources: tuple[SourceConfig, ...] = ()  # a mixture: [{path: a.txt, weight: 3}, {dataset: id, weight: 1}, ...]
    held_out: float = 0.05  # share of the sources kept for validation, and again for test
    sequence_length: int = 1024  # tokens per packed block
    respect_boundaries: bool | None = None  # no attention across documents of a block; left out, for conversations only
    max_bad_rows: int = 100  # rows of a source that may be unusable: they are skipped and reported
    evaluation_blocks: int = 64  # held-out blocks that an evaluation reads at most
    own_text: float = 0.0  # share of the steps, the last ones; every other reads the model's own text, for the exits
    own_text_rows: int = 128  # blocks of its own text that the model writes for them
    draft_vocabulary: int | None = None  # tokens the finished checkpoint drafts with, most frequent; null: all

    def __post_init__(self) -> None:
        if self.sources:
            given = [f.name for f in fields(SourceConfig) if getattr(self, f.name) != f.default]
            both = f"data.sources and data.{' '.join(given[:1])} exclude each other"
            check(not given, f"{both}: put it into an item of the list")
        else:
            self.check_source("data")
        check_at_least("data", self, {"sequence_length": 32, "evaluation_blocks": 1, "max_bad_rows": 0})
        check_at_least("data", self, {"own_text_rows": 2, "draft_vocabulary": 2})
        check(0 <= self.own_text <= 1, f"data.own_text is {self.own_text}; it is a share of the steps, 0 to 1")
        check(0 < self.held_out <= 0.4, f"data.held_out is {self.held_out}; it must be above 0 and at most 0.4")

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """The sources, of which there is one where `sources` is empty."""
        return self.sources or (self,)

    @property
    def has_boundaries(self) -> bool:
        """Whether a document sees nothing of the others in its block.

        Left out, it is so for conversations, which have nothing to do with each other. For text it is not: long
        documents fill most blocks alone, and GPUs have faster attention for a block that needs no mask.
        """
        if self.respect_boundaries is not None:
            return self.respect_boundaries
        return any(source.has_answers for source in self.all_sources)
