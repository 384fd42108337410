"""Planted faults of layers: plausible wrong implementations, under the law that must reject them."""

from __future__ import annotations

from dataclasses import replace

import torch

from centroidkv.cache import FixedState, GrowingState
from centroidkv.cache.parts import Whole
from centroidkv.testing import layer_laws
from centroidkv.testing.layer_laws import Layered


class ForgetsDegrees(GrowingState):
    """Every slot counts once."""

    def append(self, *arguments):
        keys, values, degree = super().append(*arguments)
        return keys, values, (degree > 0).float()


class OneTokenLate(GrowingState):
    """The interval is counted from the token after the event."""

    def __init__(self, compressor, interval):
        super().__init__(compressor, interval + 1)


class OneClock(GrowingState):
    """All rows are compressed when the longest is due."""

    def _settle(self, longer, grown, clocks, log):
        return super()._settle(longer, grown, [max(clocks, key=lambda clock: clock.seen)] * len(clocks), log)


class ShowsWhatIsKept(GrowingState):
    """The tokens that trigger a compression attend to centroids already."""

    def append(self, *arguments):
        super().append(*arguments)
        return self.state.keys, self.state.values, self.state.degree


class DegreesStay(GrowingState):
    """A reorder moves keys and values, not what they count for."""

    def reorder(self, rows):
        before = self.state.degree[:, :, :]
        super().reorder(rows)
        state = self.state
        degree = before[:1].expand_as(state.degree).clone()
        self._kept = Whole(replace(state, degree=torch.where(state.degree > 0, degree, 0.0)))


class ClocksStay(GrowingState):
    """A reorder leaves every place its clock."""

    def reorder(self, rows):
        before = self._clocks
        super().reorder(rows)
        self._clocks = [before[min(index, len(before) - 1)] for index in range(len(rows))]


class CropsOneLess(GrowingState):
    """The newest token survives a crop of several."""

    def crop(self, tokens):
        super().crop(max(tokens - 1, 1))


class CropsCentroids(GrowingState):
    """A crop takes whatever is last."""

    def check_crop(self, tokens):
        pass


class CropsByColumns(FixedState):
    """A crop of more columns than slots counts from the end."""

    def crop(self, tokens):
        slots = self.physical
        if tokens <= slots:
            return super().crop(tokens)
        self.restore(self.state.map_slots(lambda x: x[:, :, : slots - tokens], seen=self.state.seen - 1), self.logical)


class TakesThenCompresses(GrowingState):
    """Tokens are kept before the compressor is asked, which may fail."""

    def append(self, keys, values, real=None, queries=None, degrees=False):
        try:
            return super().append(keys, values, real, queries, degrees)
        except ArithmeticError:
            self.logical += keys.shape[2]
            raise


class CompressesAfterAnError(GrowingState):
    """An error leaves the clocks as if the rows had been compressed."""

    def append(self, *arguments):
        try:
            return super().append(*arguments)
        except ArithmeticError:
            self._clocks = [replace(clock, since=0, events=clock.events + 1) for clock in self._clocks]
            raise


class CountsRealTokens(GrowingState):
    """Bytes of the longest row, not of all columns."""

    @property
    def nbytes_full(self):
        return super().nbytes_full * int(self.state.seen.max()) // max(self.logical, 1)


class KeepsItsClocks(GrowingState):
    """clear() forgets the slots, not when they were compressed."""

    def clear(self):
        clocks = getattr(self, "_clocks", [])
        super().clear()
        self._clocks = clocks


LAYER = {
    layer_laws.shows_what_a_run_by_hand_shows: {
        "degrees forgotten": Layered(ForgetsDegrees),
        "an interval of one more": Layered(OneTokenLate),
        "one clock for all rows": Layered(OneClock),
        "centroids already": Layered(ShowsWhatIsKept),
    },
    layer_laws.rows_move_with_all_they_have: {
        "degrees stay": Layered(DegreesStay),
        "clocks stay": Layered(ClocksStay),
    },
    layer_laws.a_crop_leaves_no_trace: {
        "one less": Layered(CropsOneLess),
        "centroids as well": Layered(CropsCentroids),
        "counted from the end": Layered(CropsByColumns),
    },
    layer_laws.an_error_changes_nothing: {
        "columns are counted": Layered(TakesThenCompresses),
        "rows count as compressed": Layered(CompressesAfterAnError),
    },
    layer_laws.counts_what_it_holds: {
        "padding is no column": Layered(CountsRealTokens),
        "clear() keeps the clocks": Layered(KeepsItsClocks),
    },
}
