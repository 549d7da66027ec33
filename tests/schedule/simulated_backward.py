"""The backward in the simulator: how it is told what it walks, and mistakes that must be found."""

from __future__ import annotations

from simulated import Mutation, Simulated

MUTATIONS = (
    Mutation(
        "finished_without_stage",
        (
            ("done + 1 < steps), FINISHED + at.index,", "done + 1 < steps), FINISHED,"),
            ("FINISHED + (SPARE ? before : at.index),", "FINISHED,"),
        ),
    ),
    Mutation(
        "asked_for_before_all_have_finished",
        (("bar_sync(is_last_group && (!SPARE || done > 0), FINISHED", "bar_sync(0, FINISHED"),),
    ),
    Mutation("asked_for_before_it_has_finished", (("wgmma_wait(WITH_DS); ", "wgmma_wait(WITH_DS + 2); "),)),
    Mutation("asked_for_into_the_stage_at_work", (("base, freed, &w,", "base, freed * 0 + at.index, &w,"),)),
    Mutation("asked_for_a_step_too_early", (("freed = SPARE ? index_before(before) : before;", "freed = before;"),)),
    Mutation(
        "more_asked_for_than_there_is",
        (("next.head < w.heads && arrived && !load.alone", "arrived && !load.alone"),),
    ),
    Mutation("arrives_once_more_than_is_met", (("(!SPARE || done + 1 < steps)", "1"),)),
    Mutation("statistics_not_announced", (("full, STATISTICS_BYTES);", "full, 0);"),)),
    Mutation("statistics_of_another_row", (("statistics_map, full, 2 * row,", "statistics_map, full, row,"),)),
    Mutation("arrivals_of_one_loader", (("? 1 : LOADERS - DP_ALONE", "? 1 : 1"),)),
    Mutation("owned_rows_not_awaited", (("WALK_BYTES + more_bytes", "WALK_BYTES + 0 * more_bytes"),)),
    Mutation("the_other_way_along_a_head", (("(w->start + FORWARDS * at.tile)", "(w->start - FORWARDS * at.tile)"),)),
    Mutation(
        "own_rows_of_the_first_warpgroup",
        (("0, w->own_row + group * ROWS, w->own_head", "0, w->own_row, w->own_head"),),
    ),
    Mutation("the_next_tile_is_not_awaited", (("after.phase ^ PHASE(done + 1 == steps)", "after.phase ^ PHASE(1)"),)),
    Mutation("waits_in_vain_after_the_last_step", (("PHASE(done + 1 == steps)", "0u"),)),
    Mutation("waits_in_vain_for_nothing", (("first = PHASE(steps <= 0);", "first = 0;"),)),
    Mutation("stored_before_the_end", (("  wgmma_wait(0);\n", ""),)),
    Mutation("loads_after_a_time_out", (("w.heads && arrived && !", "w.heads && !"),), time_outs=True),
    Mutation(
        "runs_ahead_after_a_time_out",
        (
            ("bar_arrive(is_last_group && next.head < w.heads, LOADED", "bar_arrive(0, LOADED"),
            (
                "bar_sync(!is_last_group && done + 1 < steps && done + 1 >= STAGES - 1 - SPARE, LOADED",
                "bar_sync(0, LOADED",
            ),
        ),
        time_outs=True,
    ),
    Mutation("arrivals_of_all_loaders_at_the_one_place", (("? 1 : LOADERS - DP_ALONE", "? LOADERS : LOADERS"),)),
    Mutation(
        "who_asks_may_still_be_asleep",
        (("bar_sync(SPARE && is_last_group && done == 0, AWAKE, WARPGROUP_THREADS);", ""),),
        time_outs=True,
    ),
    Mutation(
        "the_one_place_not_awaited",
        (("mbarrier_wait_steady(dp_full, PHASE(done & 1)", "mbarrier_wait_steady(dp_full, 0"),),
    ),
    Mutation(
        "asked_for_before_all_have_dp",
        (
            ("bar_arrive(!is_last_group && done + 1 < steps, DP_FREE", "bar_arrive(0, DP_FREE"),
            ("bar_sync(is_last_group && done + 1 < steps, DP_FREE", "bar_sync(0, DP_FREE"),
        ),
    ),
    Mutation(
        "asked_for_before_dp",
        (
            ("if (DP_ALONE) LOAD_DP();", ""),
            ("wgmma_wait(WITH_P);", "if (DP_ALONE) { LOAD_DP(); } wgmma_wait(WITH_P);"),
        ),
    ),
    Mutation("more_asked_for_into_the_one_place", (("next.head < w.heads && arrived && load.alone", "load.alone"),)),
    Mutation("asked_for_beside_the_one_place", (("base, 0, &w, next,", "base, 1, &w, next,"),)),
    Mutation(
        "loads_into_the_one_place_after_a_time_out",
        (("w.heads && arrived && load.alone", "w.heads && load.alone"),),
        time_outs=True,
    ),
    Mutation(
        "runs_ahead_of_the_one_place_after_a_time_out",
        (
            ("bar_arrive(is_last_group && done + 1 < steps, DP_ASKED", "bar_arrive(0, DP_ASKED"),
            ("bar_sync(!is_last_group && done > 0, DP_ASKED", "bar_sync(0, DP_ASKED"),
        ),
        time_outs=True,
    ),
    Mutation("rows_not_poisoned", (("poison = arrived ? 0.f : NAN;", "poison = 0.f;"),), time_outs=True),
)

BACKWARD_MODEL = ("model.cpp", "dq.cpp")

BACKWARD = Simulated(
    name="backward",
    scheduled=(("const walk w = walk_of(&p, (int)blockIdx.x);", "const walk w = scheduled_walk<walk>();"),),
    tiles_and_steps=((3, 5), (1, 12)),
    mutations=MUTATIONS,
    model=BACKWARD_MODEL,
)
