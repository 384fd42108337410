"""All situations of the matrix, in the order of its table. Each is a function of a Case, named by itself."""

from matrix_batches import chunked_prefill, left_padded, left_padded_chunks, right_padded, several_at_once
from matrix_generate import (
    assisted,
    beam_search,
    cache_alone,
    chat_with_full_history,
    eager,
    greedy,
    num_return_sequences,
    only_new_ids,
    sampling,
    weighed_by_queries,
)
from matrix_life import (
    beyond_the_models_window,
    crop,
    deep_copies,
    exception_on_the_way,
    other_layers_untouched,
    reset,
    stays_bounded,
)

SITUATIONS = (
    greedy, eager, cache_alone, weighed_by_queries, left_padded, right_padded, chunked_prefill, left_padded_chunks,
    several_at_once, chat_with_full_history, only_new_ids, sampling, num_return_sequences, beam_search, assisted, crop,
    beyond_the_models_window, deep_copies, reset, exception_on_the_way, stays_bounded, other_layers_untouched,
)  # fmt: skip
