"""A CLIP tokenizer for a small vocabulary, by byte-level pair merging.

Every word of the captions is one token. All 256 bytes are in the vocabulary as well, so any other
text is tokenized too, byte by byte.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

START, END = "<|startoftext|>", "<|endoftext|>"
LENGTH = 77


def _byte_symbols() -> list[str]:
    """CLIP's printable character for each byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [value for value in range(256) if value not in printable]
    symbols = {value: chr(value) for value in printable}
    symbols.update({value: chr(256 + index) for index, value in enumerate(unprintable)})
    return [symbols[value] for value in range(256)]


def merges_of(words: list[str]) -> list[tuple[str, str]]:
    """Merges, in rank order, after which each of `words` (ASCII, lower case) is a single symbol."""
    pieces = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges = []
    while counts := Counter(pair for word in pieces for pair in pairwise(word)):
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        pieces = [_merged(word, best) for word in pieces]
    return merges


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    index = 0
    while index < len(word):
        if tuple(word[index : index + 2]) == pair:
            out.append(pair[0] + pair[1])
            index += 2
        else:
            out.append(word[index])
            index += 1
    return out


def vocabulary_of(words: list[str]) -> dict[str, int]:
    """Symbol to id: bytes, bytes that end a word, merges, start, end; as vocab.json has it."""
    symbols = _byte_symbols()
    entries = [*symbols, *(symbol + "</w>" for symbol in symbols)]
    entries += [first + second for first, second in merges_of(words)]
    return {entry: index for index, entry in enumerate([*entries, START, END])}


def word_ids(words: list[str]) -> dict[str, int]:
    """Id of each whole word and of the two special tokens."""
    vocabulary = vocabulary_of(words)
    return {word: vocabulary[word + "</w>"] for word in words} | {
        special: vocabulary[special] for special in (START, END)
    }


def save(words: list[str], directory: Path) -> None:
    """Write the files that transformers' CLIPTokenizer reads."""
    directory.mkdir(parents=True, exist_ok=True)
    merges = "\n".join(f"{first} {second}" for first, second in merges_of(words))
    special = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
    config = {
        "add_prefix_space": False,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": LENGTH,
        "tokenizer_class": "CLIPTokenizer",
        **special,
    }
    texts = {
        "vocab.json": json.dumps(vocabulary_of(words), ensure_ascii=False, indent=0),
        "merges.txt": f"#version: 0.2\n{merges}\n",
        "special_tokens_map.json": json.dumps(special, indent=2) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
