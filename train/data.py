"""The run's data: tokenizer, packed tokens and prompts, made once and read by every process."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.checkpoint.whole_files import read_json, write_json
from train.bad_rows import BadRows
from train.blocks import Blocks, Mixture
from train.chat import ChatTemplate
from train.config import TrainConfig
from train.corpus import describe, read_documents
from train.disk import writing_alone
from train.errors import TrainingError
from train.packing import Written, encode_documents, token_dtype, write_tokens
from train.prompts import choose_prompts, write_prompts
from train.rows import check_held_out
from train.splits import HELD_OUT, SPLITS, Document, Groups
from train.text_config import SourceConfig
from train.vocabulary import build_tokenizer, load_tokenizer, padding_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DOCUMENTS_FOR_PROMPTS = 256  # of each held-out split: enough variety, little memory


@dataclass(frozen=True)
class Data:
    """What training reads."""

    tokenizer: "PreTrainedTokenizerBase"
    train: Mixture
    validation: Mixture  # chooses exit_layer and num_draft_tokens
    test: Mixture  # is only reported
    has_boundaries: bool  # whether a document sees nothing of the others in its block
    notes: tuple[str, ...]  # what a person should know of the text: rows that were skipped, documents cut


def prepare_data(config: TrainConfig) -> None:
    """Write tokenizer/, data/ and prompts/ into the run folder unless they are there.

    Called by one process. The same run always finds the same files, so a resumed run reads the tokens it
    began with, whatever has become of the text since. Raises `TrainingError` for text that cannot be used, or a
    disk that is full, and `ConfigError` for a file that is both trained on and held out.
    """
    folder = config.run.folder
    manifest = _manifest(folder)
    if manifest.is_file():
        return
    check_held_out(config.data.all_sources)
    groups = Groups(config.data.sequence_length)
    record = _write_text(config, groups, {})
    if moved := groups.moves():
        record = _write_text(config, groups, moved)
        record["sources"][0]["notes"].append(
            f"so few documents that data.held_out={config.data.held_out} left a split without any: one was moved to "
            f"{' and one to '.join(moved.values())}; what is measured on so little text says little"
        )
    _check_counts(record["sources"], config.data.sequence_length)
    with writing_alone(manifest):
        write_json(manifest, record)


def _write_text(config: TrainConfig, groups: Groups, moved: Mapping[float, str]) -> dict[str, Any]:
    """Write all but the manifest, which is returned; `groups` notes what was written, and was `moved`."""
    folder = config.run.folder
    tokenizer = build_tokenizer(config, _training_texts(config, moved))
    with writing_alone(folder / "tokenizer"):
        tokenizer.save_pretrained(folder / "tokenizer")
    template = ChatTemplate(tokenizer) if any(source.is_chat for source in config.data.all_sources) else None
    held_out: dict[str, list[Document]] = {split: [] for split in HELD_OUT}
    writer = _Writer(config, tokenizer, template, groups, moved, held_out)
    records = [writer.write(number, source) for number, source in enumerate(config.data.all_sources)]
    for split, kept in held_out.items():
        write_prompts(choose_prompts(kept, tokenizer, template), folder / "prompts" / f"{split}.jsonl")
    return {"sources": records, "vocab_size": len(tokenizer)}


def open_data(config: TrainConfig, has_boundaries: bool | None = None) -> Data:
    """The data that `prepare_data` wrote; `has_boundaries` overrides the setting.

    Raises `TrainingError` if a source has no block to train on, or a held-out split none in any source.
    """
    folder, data = config.run.folder, config.data
    has_boundaries = data.has_boundaries if has_boundaries is None else has_boundaries
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    dtype, weights = token_dtype(len(tokenizer)), [source.weight for source in data.all_sources]
    splits = {}
    for split in SPLITS:
        paths = [source_folder(config, number) / f"{split}.bin" for number in range(len(weights))]
        # Of a small source there may be nothing to hold out, as long as there is of others.
        least = 1 if split == "train" or len(paths) == 1 else 0
        parts = [Blocks(path, dtype, data.sequence_length, has_boundaries, least) for path in paths]
        if not any(map(len, parts)):
            raise TrainingError(
                f"no source has a whole block of {split} text: lower data.sequence_length, or give more"
            )
        splits[split] = Mixture(parts, weights)
    records = read_json(_manifest(folder))["sources"]
    notes = tuple(f"{record['source']}: {note}" for record in records for note in record["notes"])
    return Data(tokenizer, **splits, has_boundaries=has_boundaries, notes=notes)


def _manifest(folder: Path) -> Path:
    """Written last: its presence says that all is there."""
    return folder / "data" / "manifest.json"


def source_folder(config: TrainConfig, number: int) -> Path:
    """Where the token files of source `number` are: each in a folder of its own, if there are several."""
    folder = config.run.folder / "data"
    return folder / f"source-{number}" if config.data.sources else folder


@dataclass(frozen=True)
class _Writer:
    """Writes the token files of a run's sources, one after the other."""

    config: TrainConfig
    tokenizer: "PreTrainedTokenizerBase"
    template: ChatTemplate | None
    groups: Groups  # is told of each document that is written
    moved: Mapping[float, str]  # see `Groups.moves`
    held_out: dict[str, list[Document]]  # the first documents of each held-out split, for prompts

    def write(self, number: int, source: SourceConfig) -> dict[str, Any]:
        """Write source `number`; returns its record: {"source", "tokens" by split, "bad_rows", "lost_rows",
        "notes"}."""
        data = self.config.data
        bad = BadRows(data.max_bad_rows)
        documents = read_documents(source, data.held_out, bad, moved=self.moved)
        encoded = encode_documents(_keep_held_out(documents, self.held_out), self.tokenizer, self.template, bad)
        block = data.sequence_length if source.has_answers else None
        folder, dtype = source_folder(self.config, number), token_dtype(len(self.tokenizer))
        written = write_tokens(encoded, dtype, folder, block, padding_id(self.tokenizer), self.groups)
        return {
            "source": describe(source),
            "tokens": written.tokens,
            "bad_rows": bad.count,
            "lost_rows": written.num_lost,
            "notes": [note for note in (bad.report(), _cut_note(written, block), self._template_note()) if note],
        }

    def _template_note(self) -> str:
        """What the chat template did to this source's conversations; the count begins anew for the next one."""
        if self.template is None or not self.template.last_answers_only:
            return ""
        count, self.template.last_answers_only = self.template.last_answers_only, 0
        return f"of {count} conversations only the last answer is learnt (chat template)"


def _cut_note(written: Written, block: int | None) -> str:
    if not written.num_cut:
        return ""
    longer = f"{written.num_cut} rows are longer than data.sequence_length={block} tokens and were cut to it"
    return f"{longer}, {written.num_lost} left out because their answer lies beyond"


def _training_texts(config: TrainConfig, moved: Mapping[float, str]) -> Iterator[str]:
    """The texts a tokenizer may be trained on: held-out text is not among them."""
    for source in config.data.all_sources:
        bad = BadRows(config.data.max_bad_rows)
        for document in read_documents(source, config.data.held_out, bad, moved=moved):
            if document.split == "train":
                yield document.text


def _keep_held_out(documents: Iterable[Document], kept: dict[str, list[Document]]) -> Iterator[Document]:
    """Pass the documents on, and put the first held-out ones into `kept`."""
    room = {split: len(some) + _DOCUMENTS_FOR_PROMPTS for split, some in kept.items()}
    for document in documents:
        split = document.split
        if split in kept and len(kept[split]) < room[split]:
            kept[split].append(document)
        yield document


def _check_counts(records: list[dict[str, Any]], sequence_length: int) -> None:
    """Raise `TrainingError` if there are too few documents for each split to have one."""
    empty = [split for split in SPLITS if not any(record["tokens"][split] for record in records)]
    if not empty:
        return
    reason = (
        "training, validation and test need a document each, and those of one group (or of the same text) count as "
        "one; give more, or one text file alone, whose end is then held out"
    )
    if lost := sum(record["lost_rows"] for record in records):
        reason = (
            f"{lost} {'row was' if lost == 1 else 'rows were'} left out, longer than data.sequence_length="
            f"{sequence_length} tokens with the answer beyond them; raise it, or give shorter ones"
        )
    raise TrainingError(f"no text for {' and '.join(empty)}: {reason}")
