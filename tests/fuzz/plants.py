"""Faults that the fuzzer has to find. Each is planted by ``plant(put)``, ``put`` being ``setattr`` or a monkeypatch's.

They import what they need themselves, because their source is copied into scripts.
"""

from __future__ import annotations


def on_append(put, change):
    """What a layer hands to the attention, changed: ``change(keys, values, degree)``, once something was merged."""
    from centroidkv.cache import GrowingState

    plain = GrowingState.append

    def append(self, *args, **kwargs):
        keys, values, degree = plain(self, *args, **kwargs)
        return (keys, values, degree) if degree is None else change(keys, values, degree)

    put(GrowingState, "append", append)


def ln_n_is_left_out(put):
    on_append(put, lambda keys, values, degree: (keys, values, degree.clamp(max=1)))


def ln_n_is_rounded_to_bfloat16(put):
    on_append(put, lambda keys, values, degree: (keys, values, degree.log().bfloat16().float().exp()))


def values_are_those_of_another_row(put):
    on_append(put, lambda keys, values, degree: (keys, values.roll(1, 0), degree))


def keys_of_heads_are_swapped(put):
    on_append(put, lambda keys, values, degree: (keys.flip(1), values, degree))


def degrees_are_off_by_one_after_a_reorder(put):
    from dataclasses import replace

    from centroidkv.state import KVState

    plain = KVState.rows

    def rows(self, index):
        state = plain(self, index)
        return replace(state, degree=state.degree + (state.degree > 1))

    put(KVState, "rows", rows)


def a_crop_loses_a_token(put):
    from dataclasses import replace

    from centroidkv.cache.parts import Whole

    plain = Whole.crop

    def crop(self, tokens):
        whole, gone = plain(self, tokens)
        degree = whole.state().degree.clone()
        degree[:, :, -1:] = 0
        return Whole(replace(whole.state(), degree=degree)), gone

    put(Whole, "crop", crop)


def padding_is_taken_as_real(put):
    from centroidkv.cache import GrowingState

    plain = GrowingState.append

    def append(self, keys, values, real=None, *args, **kwargs):
        return plain(self, keys, values, None, *args, **kwargs)

    put(GrowingState, "append", append)


def an_error_in_the_middle_is_forgotten(put):
    from centroidkv.integrations.transformers import checks

    put(checks, "check_level", lambda *args: None)
    put(checks, "check_received", lambda *args: None)


def a_preserved_key_moves(put):
    from dataclasses import replace

    from centroidkv.compressor import Compressor

    plain = Compressor.__call__

    def call(self, state, **options):
        result = plain(self, state, **options)
        return result if result is state else replace(result, keys=result.keys * (1 + 1e-6))

    put(Compressor, "__call__", call)


def pages_hold_degrees_of_another_head(put):
    from dataclasses import replace

    from centroidkv.paged.pages import Pages

    plain = Pages.fill

    def fill(self, blocks, state, row):
        plain(self, blocks, replace(state, degree=state.degree.flip(1)), row)

    put(Pages, "fill", fill)


def a_request_reads_one_block_too_few(put):
    from dataclasses import replace

    from centroidkv.paged import batch

    plain = batch._segment

    def segment(*args):
        found = plain(*args)
        return replace(found, length=found.length - 1) if found.first and found.stop - found.start == 1 else found

    put(batch, "_segment", segment)


def blocked_rounds_forget_degrees(put):
    from dataclasses import replace

    from centroidkv.rounds import blocked

    plain = blocked.blocked_rounds

    def rounds(state, *args):
        result = plain(replace(state, degree=state.degree.clamp(max=1)), *args)
        return replace(result, degree=plain(state, *args).degree)

    put(blocked, "blocked_rounds", rounds)


LIFE = (
    ln_n_is_left_out, ln_n_is_rounded_to_bfloat16, values_are_those_of_another_row, keys_of_heads_are_swapped,
    degrees_are_off_by_one_after_a_reorder, a_crop_loses_a_token, padding_is_taken_as_real,
    an_error_in_the_middle_is_forgotten, a_preserved_key_moves,
)  # fmt: skip
POOL = (pages_hold_degrees_of_another_head, a_request_reads_one_block_too_few)
BACK_ENDS = (blocked_rounds_forget_degrees,)
