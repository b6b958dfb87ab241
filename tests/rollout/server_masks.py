"""The masks of another llguidance, for the tokens of given answers: a program for the Python of a server's environment.

It reads a JSON object from its standard input, and prints a hash of each mask. It needs llguidance and numpy alone.
"""

import hashlib
import json
import sys

import llguidance
import numpy as np

asked = json.load(sys.stdin)
size = asked["size"]
tokenizer = llguidance.LLTokenizer(asked["tokenizer"], n_vocab=size, eos_token=asked["end_ids"])
hashes = []
for grammar, ids in zip(asked["grammars"], asked["answers"], strict=True):
    matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("grammar", grammar))
    found = []
    for token in ids:
        words = np.zeros(-(-size // 32), np.uint32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=size)
        found.append(hashlib.blake2b(bits.tobytes(), digest_size=8).hexdigest())
        matcher.consume_token(token)
    hashes.append(found)
print(json.dumps(hashes))
