import copy
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations

import cloudpickle
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from dask.base import tokenize

from dpdask.streams import STREAM_FORMAT, RunKey, stream, words

KEY = RunKey.insecure(1815)
IDS = [
    ("a", "bc"),
    ("ab", "c"),
    ("abc", ""),
    ("", "abc"),
    ("a", "b"),
    ("b", "a"),
    ("a", "b\x00"),
    ("dip/x", "f1"),
    ("dip/x", "f2"),
    ("dip/y", "f1"),
]


def oracle(key, mechanism_id, fragment_id, n_words):
    """AES-128 of the little-endian counters 0, 1, 2… under the keyed BLAKE2b of the two length-prefixed names."""
    message = b"".join(
        len(name.encode()).to_bytes(8, "little") + name.encode()
        for name in (mechanism_id, fragment_id)
    )
    aes = blake2b(message, key=key, person=b"dpdask stream 1", digest_size=16).digest()
    blocks = b"".join(i.to_bytes(16, "little") for i in range((n_words + 1) // 2))
    return np.frombuffer(
        Cipher(algorithms.AES(aes), modes.ECB()).encryptor().update(blocks), "<u8"
    )[:n_words].tolist()


@pytest.mark.parametrize("n_words", [1, 2, 7, 8, 9, 16, 1000])
@pytest.mark.parametrize("ids", [("dip/rating", "f00"), ("", ""), ("dip/größe", "φ" * 300)])
def test_a_stream_is_aes_128_in_counter_mode(ids, n_words):
    assert words(stream(KEY, *ids), n_words).tolist() == oracle(KEY.reveal(), *ids, n_words)


def test_the_stream_format_is_pinned():
    assert STREAM_FORMAT == 1
    assert words(stream(RunKey.insecure(7), "a", "b"), 3).tolist() == [
        14787043944292998176,
        15126083115808589158,
        12623715749674364014,
    ]


def test_streams_of_distinct_names_or_keys_are_unrelated():
    drawn = [
        words(stream(key, *ids), 64)
        for key in (KEY, RunKey.insecure(1816), RunKey.fresh())
        for ids in IDS
    ]
    for one, other in combinations(drawn, 2):
        assert not set(one.tolist()) & set(
            other.tolist()
        )  # 64-bit words: a shared one is a shared stream, at any offset
        agreeing = np.bitwise_count(~(one ^ other)).sum() / (64 * 64)
        assert 0.45 < agreeing < 0.55


@pytest.mark.parametrize(
    "sizes",
    [[5000, 3, 4096, 1, 20_001, 40_000, 7], [1, 16_384, 16_384], [16_383, 0, 16_385, 1], [100_001]],
)
def test_many_words_go_on_where_few_stopped(sizes):
    """Words are encrypted in parts of 16,384."""
    rng = stream(KEY, "m", "f")
    drawn = np.concatenate([words(rng, size) for size in sizes])
    assert drawn.tolist() == oracle(KEY.reveal(), "m", "f", sum(sizes))


def test_a_generator_of_a_stream_is_seeded_by_its_next_words():
    rng, again = stream(KEY, "m", "f"), stream(KEY, "m", "f")
    first, second = rng.seed_generator().random(5), rng.seed_generator().random(5)
    assert not set(first.tolist()) & set(second.tolist())
    assert again.seed_generator().random(5).tolist() == first.tolist()
    assert words(again, 4).tolist() == words(stream(KEY, "m", "f"), 8)[4:].tolist()


# ---- the key


def test_a_fresh_key_is_256_bits_and_new_each_time():
    keys = {RunKey.fresh().reveal() for _ in range(50)}
    assert len(keys) == 50
    assert {len(key) for key in keys} == {32}


@pytest.mark.parametrize("secret", [b"", b"short-secret", b"s" * 31, b"s" * 33])
def test_a_key_of_another_length_is_refused_without_showing_it(secret):
    with pytest.raises(ValueError, match="32 bytes") as caught:
        RunKey(secret)
    assert not secret or secret.decode() not in str(caught.value)


@dataclass(frozen=True)
class Holder:
    key: RunKey


@pytest.mark.parametrize(
    "hold",
    [lambda key: key, lambda key: [key], lambda key: {"key": key}, Holder],
    ids=["bare", "list", "dict", "dataclass"],
)
@pytest.mark.parametrize(
    "dumps",
    [pickle.dumps, cloudpickle.dumps, copy.deepcopy, tokenize],
    ids=["pickle", "cloudpickle", "deepcopy", "tokenize"],
)
def test_a_key_is_never_pickled_copied_or_tokenised_however_it_is_held(dumps, hold):
    with pytest.raises(TypeError, match=r"never (pickled|tokenised)") as caught:
        dumps(hold(KEY))
    assert str(KEY.reveal()) not in repr(caught.value)


def test_a_key_does_not_show(caplog):
    secret = b"0123456789abcdefSECRETSECRET1815"
    key = RunKey(secret)
    logging.getLogger("dpdask").warning("%s %r", key, Holder(key))
    shown = f"{key} {key!r} {[key]} {Holder(key)} {caplog.text}"
    assert "SECRET" not in shown
    assert secret.hex() not in shown
    assert "hidden" in shown
    assert not hasattr(key, "__dict__")


def test_a_key_cannot_be_compared_into_showing():
    assert RunKey(KEY.reveal()) != KEY


def test_threads_that_share_a_stream_get_different_words():
    rng = stream(KEY, "a", "b")
    with ThreadPoolExecutor(4) as pool:
        drawn = np.concatenate(list(pool.map(lambda _: words(rng, 33), range(2000))))
    assert sorted(drawn.tolist()) == sorted(words(stream(KEY, "a", "b"), 33 * 2000).tolist())


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps, cloudpickle.dumps])
def test_a_stream_is_never_pickled_or_copied(duplicate):
    with pytest.raises(TypeError, match="never pickled or copied"):
        duplicate(stream(KEY, "a", "b"))


def test_words_fill_a_shape_row_by_row():
    drawn = words(stream(KEY, "m", "f"), 2, 3, 4)
    assert drawn.dtype == np.uint64
    assert drawn.ravel().tolist() == words(stream(KEY, "m", "f"), 24).tolist()
    assert words(stream(KEY, "m", "f"), 0, 3).shape == (0, 3)
    assert words(stream(KEY, "m", "f")).shape == ()
