"""The forward in the simulator where rows are folds over several segments, which are shorter than in any kernel that
ships, and mistakes that must be found."""

from __future__ import annotations

from dataclasses import replace

from simulated import Mutation
from simulated_forward import BETWEEN, FORWARD, LISTED, NO_TURN

# So short that query tiles have one, two and more of them; and longer than the stages of any kernel.
SHORT, LONGER = (("SEGMENT_TILES", 2),), (("SEGMENT_TILES", 8),)
OF_SHORT, OF_LONGER = ((3, 6), (2, 9)), ((1, 20), (2, 10))  # tiles and steps

# The step that ends one segment of a query tile and begins the next.
GOES_ON = "define GO_ON_TO_SEGMENT() do {"
LOADS, STORES = "load_pieces<GO_BATCH>(RESUMES(), before,", "store_pieces<GO_BATCH>(o, by, before,"
OTHERS = "PART_OUT(), first);"

OF_SEGMENTS = (
    Mutation("q_asked_for_again", (("JOINS_SEGMENTS && NEXT_SEGMENT() >= 0", "0"),)),
    Mutation("q_begun_again", ((GOES_ON, f"{GOES_ON} BEGIN_QUERIES();"),)),
    Mutation("the_last_segment_next", (("NTH_QUERY_TILE(nth, NEXT_SEGMENT());", "NTH_QUERY_TILE(nth, -1);"),)),
    Mutation("another_query_tile_next", (("nth += NEXT_SEGMENT() < 0;", "nth++;"),)),
    Mutation("the_same_query_tile_next", (("nth += NEXT_SEGMENT() < 0;", "nth += 0;"),)),
    Mutation(
        "segments_from_the_last_key_on", (("tile.last % SEGMENT_TILES + 1", "min(tile.last + 1, SEGMENT_TILES)"),)
    ),
    Mutation(
        "asked_for_as_if_it_were_the_first_segment",
        (("next->last - (visit - now->key_tiles) :", "next->key_tiles - 1 - (visit - now->key_tiles) :"),),
    ),
    Mutation("no_turn_between_segments", ((f"{GOES_ON} {BETWEEN}", f"{GOES_ON} {NO_TURN}"),)),
    Mutation("goes_on_as_a_query_tile", ((" & (NEXT_SEGMENT() < 0)", ""),)),
    Mutation("goes_on_without_what_was_before", (("!IS_SPLIT & !RESUMES() &", "!IS_SPLIT &"),)),
    Mutation("stops_at_each_segment", (("else if (JOINS_SEGMENTS", "else if (0 & JOINS_SEGMENTS"),)),
    Mutation("never_resumed", (("(tile->last < top_tile(", "(tile->last < 0 * top_tile("),)),
    Mutation("pieces_before_are_forgotten", (("load_four_if(go, before[i],", "load_four_if(go & 0, before[i],"),)),
    Mutation("pieces_of_another_query_tile", (("load_four_if(go, before[i],", "load_four_if(go | 1, before[i],"),)),
    Mutation(
        "one_piece_before_for_all_of_a_batch",
        (("before[i], out + offset_of_piece(first + i));", "before[i], out + offset_of_piece(first));"),),
    ),
    Mutation(
        "sums_before_are_forgotten", (("load_two_if(exist, &before[r],", "load_two_if((exist) & 0, &before[r],"),)
    ),
    Mutation(
        "sums_of_another_query_tile", (("load_two_if(exist, &before[r],", "load_two_if((exist) | 1, &before[r],"),)
    ),
    Mutation(
        "sums_before_read_after_the_lanes_met",
        (
            ("SUM_QUADS(); for (int r = 0; r < THREAD_ROWS; r++) by", "for (int r = 0; r < THREAD_ROWS; r++) by"),
            ("float2 before[THREAD_ROWS];", "float2 before[THREAD_ROWS]; SUM_QUADS();"),
        ),
    ),
    Mutation(
        "sums_go_on_in_the_next_segment",
        (
            ("stats.shift[r] = -p.highest_score;", "stats.shift[r] = RESUMES() ? stats.shift[r] : -p.highest_score;"),
            (
                "stats.sum[r] = stats.rescale[r] = 0.f;",
                "stats.sum[r] = RESUMES() ? stats.sum[r] : 0.f; stats.rescale[r] = 0.f;",
            ),
        ),
    ),
    Mutation("o_goes_on_in_the_next_segment", (("TILE_K, t > 1,", "TILE_K, t > 1 || RESUMES(),"),)),
    Mutation("a_part_of_another_row", (("piece / ROW_PIECES * 8) * DHP_PART", "piece / ROW_PIECES * 0) * DHP_PART"),)),
    Mutation("a_part_of_the_first_warp", (("+ warp * (ROWS / WARPS_PER_GROUP) + thread", "+ 0 * warp + thread"),)),
    Mutation("a_part_while_it_is_summed", (('wgmma_wait(1); _Pragma("unroll")', '_Pragma("unroll")'),)),
    Mutation(
        "the_last_while_it_is_summed",
        (
            (
                "wgmma_wait(0); SET_STORED(now); for (int r = 0; r < THREAD_ROWS; r++) STORE_LSE",
                "SET_STORED(now); for (int r = 0; r < THREAD_ROWS; r++) STORE_LSE",
            ),
        ),
    ),
    Mutation("parts_not_poisoned", (("stats.sum[r] + poison)", "stats.sum[r])"),), time_outs=True),
)

OF_LONGER_SEGMENTS = (
    Mutation(
        "own_pairs_as_if_it_were_the_first_segment",
        (("index, (now->last - (u - l->loads_v))", "index, (now->key_tiles - 1 - (u - l->loads_v))"),),
    ),
)

# At head_dim 256 segments of these end apart from the next one, as query tiles do, and q is asked for again.
OF_LISTED_SEGMENTS = (
    Mutation("q_not_asked_for_again", (("JOINS_SEGMENTS && NEXT_SEGMENT() >= 0", "NEXT_SEGMENT() >= 0"),)),
    Mutation("never_a_part", (("(!JOINS_SEGMENTS & (NEXT_SEGMENT() >= 0))", "0"),)),
    Mutation("a_part_alone_while_it_is_summed", (("STORE_SUMS(); wgmma_wait(0);", "STORE_SUMS();"),)),
    Mutation(
        "pieces_read_where_they_are_stored_over",
        ((f"{LOADS} {OTHERS} {STORES} {OTHERS}", f"{STORES} {OTHERS} {LOADS} {OTHERS}"),),
    ),
    Mutation(
        "begins_before_the_window",
        (("max(last - OF_ENTRY(&tile, key_tiles) + 1, tile.last &", "max(0, tile.last &"),),
    ),
    Mutation(
        "a_segment_before_the_window",
        (("return next > OF_ENTRY(tile, last_tile) - OF_ENTRY(tile, key_tiles) ? next : -1;", "return next;"),),
    ),
    Mutation(
        "never_resumed_in_a_list",
        (("{ return steps_before(tile) > 0; }", "{ return 0 * steps_before(tile); }"),),
    ),
)

IN_SEGMENTS = (
    replace(FORWARD, macros=SHORT, variant="short_segments", tiles_and_steps=OF_SHORT, mutations=OF_SEGMENTS),
    replace(FORWARD, macros=LONGER, variant="longer_segments", tiles_and_steps=OF_LONGER, mutations=OF_LONGER_SEGMENTS),
    replace(LISTED, macros=SHORT, variant="short_segments", tiles_and_steps=OF_SHORT, mutations=OF_LISTED_SEGMENTS),
    replace(LISTED, macros=LONGER, variant="longer_segments", tiles_and_steps=OF_LONGER, mutations=()),
)

# Segments that are items of their own, as many of every query tile: of the shorter ones no key of the last is seen.
SPLIT = replace(
    FORWARD,
    macros=(*SHORT, ("SPLITS", 3)),
    variant="split_segments",
    tiles_and_steps=OF_SHORT[:1],
    mutations=(
        Mutation("the_place_of_the_next_item", (("(nth - 1) * (int)gridDim.x", "nth * (int)gridDim.x"),)),
        Mutation("one_place_for_all", (("(IS_SPLIT ? (nth - 1) * (int)gridDim.x : 0)", "0"),)),
        Mutation("goes_on_as_a_query_tile", (("!IS_SPLIT & !RESUMES() &", "!RESUMES() &"),)),
        Mutation("takes_the_next_segment_too", (("return p->splits > 1 ? -1 :", "return p->splits > 9 ? -1 :"),)),
        Mutation("the_output_out_of_one_segment", (("define IS_PART() (IS_SPLIT |", "define IS_PART() (0 |"),)),
        Mutation("a_part_while_it_is_summed", (("STORE_SUMS(); wgmma_wait(0);", "STORE_SUMS();"),)),
        Mutation("keys_that_are_not_seen", (("top < begin ? begin + DHP_NOT_SEEN_TILES :", "top < begin ? begin :"),)),
        Mutation("parts_not_poisoned", (("stats.sum[r] + poison)", "stats.sum[r])"),), time_outs=True),
    ),
)
