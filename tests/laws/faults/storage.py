"""Planted faults of storage: plausible wrong implementations, under the law that must reject them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from centroidkv.cache import Exact, Held
from centroidkv.cache.quantised import quantise
from centroidkv.testing import storage_laws
from centroidkv.testing.storage_laws import Kept


class Changed:
    """Exact storage with one thing changed."""

    def __init__(self, put=None, get=None, **more):
        self.change_put, self.change_get = put, get
        self.__dict__.update(more)

    def put(self, state):
        return Exact().put(state) if self.change_put is None else self.change_put(state)

    def get(self, held, device):
        return Exact().get(held, device) if self.change_get is None else self.change_get(held)


def fault(put=None, get=None, **more):
    return Kept(Changed(put, get, **more))


def back(change):
    return fault(get=lambda held: change(Exact().get(held, torch.device("cpu"))))


def with_facts(**facts):
    return fault(lambda state: replace(Exact().put(state), facts={"rounds": state.rounds, **facts}))


def viewing(state):
    whole = Exact().put(state)
    padded = torch.cat((whole.tensors["keys"], whole.tensors["keys"]), 2)
    return replace(whole, tensors={**whole.tensors, "keys": padded[:, :, : state.slots]})


def in_place(state):
    state.degree.mul_(1)
    state.values.sub_(1).add_(1.5)
    return Exact().put(state)


def popped(held):
    state = Exact().get(held, torch.device("cpu"))
    held.tensors.pop("keys")
    return state


def drained(held):
    state = Exact().get(held, torch.device("cpu"))
    after = replace(state, degree=state.degree.clone(), values=state.values.clone())
    held.tensors["values"].zero_()
    return after


class OneBuffer:
    """Keeps the last state it was given, whatever Held it is asked for."""

    def __init__(self):
        self.kept = None

    def put(self, state):
        self.kept = Exact().put(state)
        return Held({"degree": state.degree.clone()}, {"rounds": state.rounds})

    def get(self, held, device):
        return Exact().get(self.kept, device)


class WrittenOver:
    """Every Held is the same memory, as far as it goes."""

    def __init__(self):
        self.values = torch.zeros(0)

    def put(self, state):
        held = Exact().put(state)
        flat = state.values.flatten()
        if self.values.dtype != flat.dtype or len(self.values) < len(flat):
            grown = torch.zeros(len(flat) + 4096, dtype=flat.dtype)
            self.values = grown
        self.values[: len(flat)] = flat
        return replace(held, tensors={**held.tensors, "values": self.values[: len(flat)].view(state.values.shape)})

    def get(self, held, device):
        return Exact().get(held, device)


class Scaled:
    """Values in units of the largest that was ever put."""

    def __init__(self):
        self.largest = 0.0

    def put(self, state):
        self.largest = max(self.largest, float(state.values.abs().max()))
        return Exact().put(replace(state, values=state.values * 2 ** round(self.largest)))

    def get(self, held, device):
        state = Exact().get(held, device)
        return replace(state, values=state.values / 2 ** round(self.largest))


def heads_averaged(state):
    return replace(state, values=state.values - state.values.mean(1, keepdim=True))


def up_to(most, change):
    return back(lambda state: change(state) if state.slots > most else state)


names = itertools.count()


class Renamed(Changed):
    @property
    def form(self):
        return f"form {next(names)}"


STORAGE = {
    storage_laws.gives_back_what_was_put: {
        "values in half precision": back(lambda s: replace(s, values=s.values.half().to(s.values.dtype))),
        "rounds forgotten": back(lambda s: replace(s, rounds=0)),
        "slot data left out": back(lambda s: replace(s, slot_data={})),
        "degrees in bfloat16": back(lambda s: replace(s, degree=s.degree.bfloat16().float())),
        "positions through float32": back(lambda s: replace(s, positions=s.positions.float().to(s.positions.dtype))),
        "everything as float32": back(lambda s: replace(s, keys=s.keys.float(), values=s.values.float())),
        "at most 2048 slots": up_to(2048, lambda s: s.map_slots(lambda x: x[:, :, :2048])),
        "four bits that promise eight": Kept(Changed(get=lambda held: quantise(Exact().get(held, torch.device("cpu")), 4).dequantise()), lambda state: quantise(state, 8).error_bound()),
    },
    storage_laws.owns_its_memory: {
        "a view of a larger buffer": fault(viewing),
        "a tuple among the facts": with_facts(shape=(1, 2)),
        "a tensor among the facts": with_facts(scale=torch.ones(1)),
    },
    storage_laws.getting_changes_nothing: {
        "used up by getting": fault(get=popped),
        "the next state is another one": fault(get=drained),
        "writes to the state": fault(in_place),
    },
    storage_laws.fetched_and_rested_are_read_alike: {
        "fetches half": fault(fetch=lambda held, device: held.map(lambda x: x.half() if x.is_floating_point() else x)),
        "rests without facts": fault(rest=lambda held, device: Held(held.tensors, {"rounds": -1})),
    },
    storage_laws.remembers_nothing: {
        "units of the largest ever": Kept(Scaled()),
        "values less their mean over heads": back(heads_averaged),
        "noise": back(lambda s: replace(s, values=s.values + torch.rand(()))),
    },
    storage_laws.states_are_kept_apart: {
        "one buffer for all": Kept(OneBuffer()),
        "one buffer, written over": Kept(WrittenOver()),
    },
    storage_laws.form_is_a_name: {
        "another one each time": Kept(Renamed()),
        "no name": fault(form=""),
    },
}  # fmt: skip
