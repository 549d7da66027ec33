"""The forward in the simulator: how it is told its query tiles, and mistakes that must be found."""

from __future__ import annotations

from dataclasses import replace

from simulated import Mutation, Simulated

# What a step begins with that ends a query tile or a segment, and begins the next one; the same without the turn.
BETWEEN = "JOIN_STEPS();"
NO_TURN = (
    "BEGIN_STEP(); wgmma_fence(); ISSUE_OUTPUT(); ISSUE_SCORES(); HAND_OVER(0, LOAD_ANY);"
    " pair = stage_after(pair); SET_POISON();"
)

MUTATIONS = (
    Mutation("load_skipped_too_seldom", (("now->key_tiles >= STAGES)", "now->key_tiles >= STAGES - 1)"),)),
    Mutation("load_skipped_never_loads", (("go && u - l->loads_v >= now->key_tiles, l,", "0 && go, l,"),)),
    Mutation(
        "no_zeros_complete_the_last_pair",
        (("next->key_tiles == 0 && !l->loads_v; const int tile", "0; const int tile"),),
    ),
    Mutation(
        "finished_without_stage",
        (
            ("!is_last_group, FINISHED + pair.index,", "!is_last_group, FINISHED,"),
            ("bar_sync(is_last_group, FINISHED + pair.index,", "bar_sync(is_last_group, FINISHED,"),
        ),
    ),
    Mutation(
        "no_arrival_for_the_missing_v",
        (("mbarrier_arrive_expect_tx(load.active && load.loads_v, pairs_full, 0);", ""),),
    ),
    Mutation(
        "asked_for_before_the_turn",
        (
            ("if (!ASKS_EARLY) LOAD(t - 1);", "if (0) LOAD(t - 1);"),
            (
                "take_turn(TURN + group); } while (0)",
                "{ if (!ASKS_EARLY) LOAD_ANY(t - 1); } take_turn(TURN + group); } while (0)",
            ),
        ),
    ),
    Mutation("warps_of_a_lone_one_do_not_meet", (("if (WARPGROUPS == 1) bar_sync(1,", "if (0) bar_sync(1,"),)),
    Mutation("never_asked_for_early", (("LOAD(t); }", "}"),)),
    Mutation(
        "asked_for_before_all_have_finished",
        (
            ("bar_sync(is_last_group, FINISHED + pair.index,", "bar_sync(0, FINISHED + pair.index,"),
            ("bar_arrive(!is_last_group, FINISHED", "bar_arrive(0, FINISHED"),
        ),
    ),
    Mutation("asked_for_while_products_read", (("if (ASKS_EARLY) { wgmma_wait(0);", "if (ASKS_EARLY) {"),)),
    Mutation(
        "q_held_before_it_has_come",
        (
            ("if (SEAMLESS) t += LATE_QUERIES(ASKED_QUERIES);", ""),
            ("if (!SEAMLESS) t += LATE_QUERIES(now.key_tiles > 0);", ""),
        ),
    ),
    Mutation(
        "q_asked_for_before_its_place_is_free",
        (("if (ASKS_AHEAD) ASK_QUERIES();", "ASK_QUERIES();"), ("if (!ASKS_AHEAD) ASK_QUERIES();", "")),
    ),
    Mutation("q_into_the_place_in_use", (("q_rows + Q_PLACE(q_parity)", "q_rows + Q_PLACE(q_parity ^ 1)"),)),
    Mutation("q_of_the_next_query_tile", (("Q_PLACE(q_parity ^ 1) /", "Q_PLACE(q_parity) /"),)),
    Mutation("one_place_for_two_query_tiles", (("Q_PLACES > 1 ? (parity)", "Q_PLACES > 1 ? 0 * (parity)"),)),
    Mutation("no_turn_while_others_are_ahead", (("take_turn(TURN + group); give_turn(1, next_turn);", ""),)),
    Mutation(
        "keys_of_a_step_of_others",
        (("next_turn); pair = stage_after(pair); bar_arrive(ASKS", "next_turn); bar_arrive(ASKS"),),
    ),
    Mutation("nobody_hears_of_a_passed_step", (("bar_arrive(ASKS_EARLY, FINISHED", "bar_arrive(0, FINISHED"),)),
    Mutation(
        "not_awaited_while_others_are_ahead",
        (("CTA_THREADS); AWAIT_PAIR_AT_LENGTH();", "CTA_THREADS);"),),
    ),
    Mutation(
        "late_pairs_of_others_steps_not_awaited_again",
        (("pair.phase, TRIES)); if (t >= LATE) AWAIT_LATE_PAIR();", "pair.phase, TRIES)); t &= LATE - 1;"),),
        time_outs=True,
    ),
    Mutation(
        "looked_for_the_pair_before",
        (
            (
                "pair = stage_after(pair); BEGIN_WAIT(); wgmma_wait(1);",
                "BEGIN_WAIT(); pair = stage_after(pair); wgmma_wait(1);",
            ),
        ),
    ),
    Mutation(
        "looked_for_in_the_other_phase",
        (("mbarrier_test(PAIR_BARRIER, state)", "mbarrier_test(PAIR_BARRIER, state_of(pair.phase ^ PHASE(1)))"),),
    ),
    Mutation("a_parity_for_a_phase", (("PHASE(q_parity ^ !(asked))", "(q_parity ^ !(asked))"),)),
    Mutation("no_tries", (("state, there, TRIES)", "state, there, 0)"),)),
    Mutation(
        "late_pairs_ignored",
        (("t++; PAIR_AT(AT_THE_END); t += LATE_UNLESS(there);", "t++; PAIR_AT(AT_THE_END);"),),
        time_outs=True,
    ),
    Mutation("q_of_the_first_warp", (("row = 16 * warp + lane % 16;", "row = 0 * warp + lane % 16;"),)),
    Mutation(
        "awaited_before_it_is_asked_for",
        (
            (
                "stage_after(pair); LOOK_AHEAD(); if (BEGINS_WITH_HALF()) END_STEP_0(FIRST_HALF); else"
                " END_STEP_0(WHOLE);",
                "stage_after(pair); phase_state state = {};"
                " uint32_t there = mbarrier_await(PAIR_BARRIER, pair.phase, TRIES); LOOK_AHEAD(); wgmma_wait(0);"
                " SOFTMAX(WHOLE, 1, LOAD_ANY); CLEAR_BEYOND(); PACK(WHOLE);",
            ),
            ("AWAITS_AT == here)", "AWAITS_AT == here && t > (AWAITS_AT == AT_THE_END))"),
        ),
    ),
    Mutation(
        "own_pairs_past_the_end", (("define PLAIN_END (now.key_tiles - STAGES)", "define PLAIN_END now.key_tiles"),)
    ),
    Mutation(
        "own_pairs_of_the_next_head", (("now->key_head,\n            now->batch", "now->key_head + 1, now->batch"),)
    ),
    Mutation(
        "loads_after_a_time_out",
        (("define LOAD_ANY(done) load_pair(arrived,", "define LOAD_ANY(done) load_pair(1,"),),
        time_outs=True,
    ),
    Mutation(
        "the_last_warpgroup_in_the_loop_that_loads_nothing",
        (("if (!LOADERS_APART || is_last_group)", "if (!LOADERS_APART || !is_last_group)"),),
    ),
    Mutation("loads_own_after_a_time_out", (("load_own_pair(arrived,", "load_own_pair(1,"),), time_outs=True),
    Mutation(
        "late_pairs_not_awaited_again",
        (("else if (t >= LATE) { AWAIT_LATE_PAIR();", "else if (t >= LATE) { t &= LATE - 1;"),),
        time_outs=True,
    ),
    Mutation(
        "a_late_pair_awaited_no_longer_than_q",
        (("mbarrier_wait_longer(PAIR", "mbarrier_wait_long(PAIR"),),
        time_outs=True,
    ),
    Mutation(
        "late_queries_not_awaited_again",
        (
            ("if (SEAMLESS) AWAIT_LATE_QUERIES(ASKED_QUERIES);", ""),
            ("break; if (!SEAMLESS) AWAIT_LATE_QUERIES(1);", "break;"),
        ),
        time_outs=True,
    ),
    Mutation("rows_not_poisoned", (("poison = arrived && !IS_BAD(now) ? 0.f : NAN", "poison = 0.f"),), time_outs=True),
    Mutation(
        "o_stored_into_the_next_query_tile",
        (("STORE_OUTPUT(tile_of_done, stored[r], r);", "STORE_OUTPUT(tile_of_done, row[r], r);"),),
    ),
    Mutation(
        "o_stored_while_it_is_summed",
        (("LOOK_AHEAD(); wgmma_wait(1);", "LOOK_AHEAD();"),),
    ),
    Mutation(
        "sums_of_the_next_query_tile",
        (
            ("SUM_QUADS(); SET_FACTORS(); SET_STORED(now);", "SET_STORED(now);"),
            ("LOOK_AHEAD(); wgmma_wait(1);", "LOOK_AHEAD(); SUM_QUADS(); SET_FACTORS(); wgmma_wait(1);"),
        ),
    ),
    Mutation(
        "factor_of_the_next_query_tile",
        (("wgmma_wait(1); for", "wgmma_wait(1); factor[0] = 1.f / (4 * stats.sum[0]); for"),),
    ),
    Mutation(
        "sums_go_on_in_the_next_query_tile",
        (
            ("stats.shift[r] = -p.highest_score;", "stats.shift[r] = nth ? stats.shift[r] : -p.highest_score;"),
            (
                "stats.sum[r] = stats.rescale[r] = 0.f;",
                "stats.sum[r] = nth ? stats.sum[r] : 0.f; stats.rescale[r] = 0.f;",
            ),
        ),
    ),
    Mutation("o_goes_on_in_the_next_query_tile", (("TILE_K, t > 1,", "TILE_K, t > 1 || nth > 1,"),)),
    Mutation(
        "no_turn_between_query_tiles",
        ((f"BEGIN_QUERIES(); {BETWEEN}", f"BEGIN_QUERIES(); {NO_TURN}"),),
    ),
)

# The model's tiles are seen whole. A first half differs in arithmetic alone, between a product and its use; a last half
# is a step of its own, which every other warpgroup takes, over the whole tile.
WHOLE_TILES = (
    ("return HALF_TILES & (seen_by_last(", "return 0 * HALF_TILES & (seen_by_last("),
    (
        "& (first_key >= (tile->last + 1 - steps) * TILE_K + TILE_K / 2);",
        "& (tile->row / forward::ROWS_APART + group + (first_key & 0)) % 2;",
    ),
    ("RUN_STEP_OVER(LAST_HALF, 1, LOAD_ANY);", "RUN_STEP_OVER(WHOLE, 1, LOAD_ANY);"),
)

FORWARD_MODEL = ("model.cpp", "parts.cpp")

FORWARD = Simulated(
    name="forward",
    part="out",
    scheduled=(
        ("tile.row = along_q * rows;", "tile.row = along_q * rows; place_as_scheduled(&tile, head_group);"),
        (
            "return min(p->seqlen_k, row + (group << p->log2_rows) + 1 + p->highest);",
            "(void)p; (void)group; return scheduled_for_first(row);",
        ),
        (
            "return min(p->seqlen_k, row + ((group + 1) << p->log2_rows) + p->highest);",
            "(void)p; return scheduled_for_last(row, group);",
        ),
        *WHOLE_TILES,
    ),
    tiles_and_steps=((4, 4), (2, 9)),
    mutations=MUTATIONS,
    model=FORWARD_MODEL,
)

# The same within windows, whose first key tiles are not seen, either.
WINDOWED = replace(
    FORWARD,
    part="window out",
    variant="",
    scheduled=(
        *FORWARD.scheduled,
        (
            "return WINDOWED ? min(max(row + lowest, 0) / TILE_K, top) : 0;",
            "(void)top; (void)lowest; return scheduled_for_bottom(row);",
        ),
        (
            "return tile->last + 1 - (max(last_row + lowest, 0) + TILE_K - 1) / TILE_K;",
            "(void)last_row; (void)lowest; return scheduled_for_plain_end(tile->row);",
        ),
    ),
    mutations=(
        Mutation(
            "a_tile_before_the_window",
            (("top + 1 - bottom_tile(tile.row, top, lowest)", "top + 2 - bottom_tile(tile.row, top, lowest)"),),
        ),
        Mutation(
            "up_to_the_first_key",
            (("top + 1 - bottom_tile(tile.row,", "top + 1 - 0 * bottom_tile(tile.row,"),),
        ),
        Mutation("plain_steps_past_the_end", (("min(PLAIN_STEPS_END(), WHOLE_STEPS())", "now.key_tiles + 1"),)),
        Mutation(
            "left_before_the_first_key",
            (("? tile->last + 1 - bottom_tile(tile->row + (group", "? tile->last - bottom_tile(tile->row + (group"),),
        ),
        Mutation("no_turn_after_it_left", (("while (t < now.key_tiles) PASS_ON_AFTER();", ""),)),
        Mutation(
            "keys_of_a_step_that_it_left",
            (("pair = stage_after(pair); t++;", "t++;"),),
        ),
        Mutation(
            "nothing_loaded_after_it_left",
            (
                (
                    "take_turn(TURN + group); HAND_OVER(GOES_ON(), LOAD_ANY);",
                    "take_turn(TURN + group); give_turn(GOES_ON(), next_turn);",
                ),
            ),
        ),
        Mutation(
            "not_awaited_after_it_left",
            (("t++; AWAIT_PAIR_AT_LENGTH();", "t++;"),),
        ),
        Mutation(
            "late_pairs_of_a_last_half_not_awaited_again",
            (("LOAD_ANY); if (t >= LATE) AWAIT_LATE_PAIR(); }", "LOAD_ANY); }"),),
            time_outs=True,
        ),
        Mutation(
            "nothing_loaded_in_a_last_half",
            (("RUN_STEP_OVER(WHOLE, 1, LOAD_ANY); if", "RUN_STEP_OVER(WHOLE, 1, (void)); if"),),
        ),
        Mutation(
            "the_last_turn_as_if_nobody_had_left",
            (("next.key_tiles == 0 && (!LEAVES_EARLY || t >= now.key_tiles)", "next.key_tiles == 0"),),
        ),
        Mutation(
            "a_turn_after_the_last",
            (("next.key_tiles == 0 && (!LEAVES_EARLY || t >= now.key_tiles)", "next.key_tiles == 0 && 0"),),
        ),
    ),
)

# A warp is one thread here, which has no lanes to keep the words of an entry: listed_words.h.
WORDS_OF_WARPS = (
    (
        "const int lane = (int)threadIdx.x % 32; "
        "const int word = load_word((const int32_t *)(list->list + tile) + min(lane, DHP_TILE_WORDS - 1)); "
        "return lane < LANE_OF_HEAD_GROUP ? word : head_group;",
        "(void)list; return word_of_warp(tile, head_group);",
    ),
    ("return __shfl_sync(FULL_MASK, word, lane);", "return looked_up(word, lane);"),
)

# The same with query tiles in a list.
LISTED = Simulated(
    name="forward",
    scheduled=WORDS_OF_WARPS,
    tiles_and_steps=FORWARD.tiles_and_steps,
    model=FORWARD_MODEL,
    part="packed out",
    mutations=(
        Mutation(
            "a_tile_too_far",
            (("now->key_row) - (visit - before) * TILE_K;", "now->key_row) - (visit - before + 1) * TILE_K;"),),
        ),
        Mutation(
            "keys_of_another_sequence",
            (("OF_ENTRY(&tile, key_row) + tile.last", "OF_ENTRY(&tile, key_row) + 1 + tile.last"),),
        ),
        Mutation(
            "cleared_by_some",
            (("if (keys_here < TILE_K) {", "if (keys_here < TILE_K - (warp & 1) * TILE_K) {"),),
        ),
        Mutation(
            "a_warp_goes_on_uncleared",
            (("bar_sync(1, CLEARED + group, WARPGROUP_THREADS);", "bar_sync(1, CLEARED + group, CTA_THREADS + 32);"),),
        ),
        Mutation(
            "rows_of_the_next_tile",
            (
                (
                    "SET_STORED(now); for (int r = 0; r < THREAD_ROWS; r++) { if",
                    "SET_STORED(next); for (int r = 0; r < THREAD_ROWS; r++) { if",
                ),
            ),
        ),
    ),
)

# And with soft caps and sinks. The model knows no caps, which are arithmetic between a product and its use.
FORMS = tuple(
    replace(LISTED, part=f"{LISTED.part} {form}", mutations=(), scheduled=(*WORDS_OF_WARPS, *left_out))
    for form, left_out in (("sinks", ()), ("softcap", (("cap_scores(s, &forms);", "(void)0;"),)))
)
