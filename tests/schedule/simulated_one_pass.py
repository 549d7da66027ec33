"""The backward in one pass in the simulator, and mistakes that must be found."""

from __future__ import annotations

from dataclasses import replace

from simulated import Mutation
from simulated_backward import BACKWARD

# What stands in more than one place, by what is next to it.
SENDS = "SEND_SHARE() send_share(sent.exists, sums_of(&p, w.batch, &sent, group)"
MARKS = "CTA_THREADS); if (!ELEMENT_IS_BFLOAT16) mark_rows(&p, &w, &last"
AWAITS_SENDING = "bulk_wait_read(); __syncwarp(); wgmma_wait(1);"
TRY = "mbarrier_try(stages_full + 8 * after.index, phase, p.zero, there)"
NAP = "mbarrier_nap_and_try(stages_full + 8 * after.index, phase, p.zero, there, nap)"
SAYS_READ = "bar_arrive(done > 0 && done + 1 < steps, READ + group + 2 * (done + 1 & 1), CTA_THREADS);"
READY = "fence_async_shared(); __syncwarp(); bulk_add"
SAYS_WRITTEN = "fence_async_shared(); bar_arrive(1, WRITTEN + group + 2 * (done & 1), CTA_THREADS);"
READS_AHEAD = "load_statistics(lse, statistics + after.index * STATISTICS_BYTES, LSE, PAIRS);"

OF_STAGES = (
    Mutation("used_without_stage", (("done > 0, USED + at.index,", "done > 0, USED,"), ("USED + after.index", "USED"))),
    Mutation(
        "loads_before_the_first_has_finished",
        (
            ("bar_sync(is_last_group && done > 0, USED", "bar_sync(is_last_group && done < 0, USED"),
            ("bar_arrive(!is_last_group && done + 1 < steps, USED", "bar_arrive(0, USED"),
        ),
    ),
    Mutation("arrives_once_more_than_is_met", (("!is_last_group && done + 1 < steps, USED", "!is_last_group, USED"),)),
    Mutation("asked_for_into_the_stage_at_work", (("base, index_before(at.index), &w,", "base, at.index, &w,"),)),
    Mutation("more_asked_for_than_there_is", (("wanted = next.head < w.heads && arrived;", "wanted = arrived;"),)),
    Mutation(
        "finished_before_its_last_product", (("wgmma_wait(0); bar_arrive(!is_last_group", "bar_arrive(!is_last_group"),)
    ),
    Mutation("loads_after_a_time_out", (("next.head < w.heads && arrived;", "next.head < w.heads;"),), time_outs=True),
)

OF_WAITS = (
    Mutation("the_second_never_begins", (("!is_last_group && done == 0, BEGUN", "0, BEGUN"),)),
    Mutation("the_second_is_told_in_each_step", (("!is_last_group && done == 0, BEGUN", "!is_last_group, BEGUN"),)),
    Mutation("the_next_tile_is_not_awaited", (("after.phase ^ PHASE(done + 1 == steps)", "after.phase ^ PHASE(1)"),)),
    Mutation("nothing_is_tried", ((TRY, "1u | phase"), (NAP, "1u | (phase & nap)"))),
    Mutation("waits_in_vain_after_the_last_step", (("PHASE(done + 1 == steps)", "0u"),)),
    Mutation("waits_in_vain_for_nothing", (("PHASE(steps <= 0), p.zero", "0, p.zero"),)),
    Mutation("a_try_too_few", (("unit, DQ_FLOATS / 2); TRY_NEXT();", "unit, DQ_FLOATS / 2);"),)),
    Mutation("a_try_does_not_know_the_one_before", ((NAP, NAP.replace("there", "0")),)),
    Mutation(
        "sleeps_for_the_first_tile_as_long_as_others_nap",
        (("mbarrier_wait_first(stages_full", "mbarrier_wait_long(stages_full"),),
        time_outs=True,
    ),
    Mutation("naps_no_longer_than_who_asks", (("is_last_group ? NAP : LONG_NAP", "NAP"),), time_outs=True),
    Mutation(
        "only_the_first_tries_count",
        (("arrived &= known;", ""), ("if (!SPARE) { TRY_NEXT();", "arrived &= known; if (!SPARE) { TRY_NEXT();")),
    ),
    Mutation("what_the_tries_say_is_lost", (("arrived &= known;", "(void)known;"),), time_outs=True),
    Mutation(
        "what_the_last_try_says_counts", (("arrived &= known;", "(void)known; arrived &= there;"),), time_outs=True
    ),
    Mutation(
        "statistics_before_their_tile",
        ((READS_AHEAD, ""), ("known = 0;", f"known = 0; {READS_AHEAD}")),
    ),
    Mutation("statistics_of_the_first_tile_not_read", (("load_statistics(lse, statistics, LSE, PAIRS);", ""),)),
    Mutation("rows_not_poisoned", (("poison = arrived ? 0.f : NAN;", "poison = 0.f;"),), time_outs=True),
    Mutation("no_failure_told", (("store_one(!arrived, p.failed", "store_one(0, p.failed"),), time_outs=True),
)

OF_PRODUCTS = (
    Mutation("probabilities_before_s", (("wgmma_wait(1); probabilities", "wgmma_wait(2); probabilities"),)),
    Mutation("score_gradients_before_dp", (("wgmma_wait(0); score_gradients", "wgmma_wait(1); score_gradients"),)),
    Mutation("a_share_before_its_product", (("__syncwarp(); wgmma_wait(1);", "__syncwarp(); wgmma_wait(2);"),)),
    Mutation("the_last_share_before_its_product", (("__syncwarp(); wgmma_wait(0);", "__syncwarp();"),)),
    Mutation("dq_of_the_first_columns", (("(SPLITS_ROWS ? 0 : group * OWN_BOX_BYTES)", "0"),)),
    Mutation("dq_of_the_first_rows", (("SPLITS_ROWS * group * 64 * ROW_BYTES", "0"),)),
)

OF_DS = (
    Mutation("stored_over_what_is_being_read", (("bar_sync(done > 1, READ", "bar_sync(0, READ"), (SAYS_READ, ""))),
    Mutation("read_said_before_it_is", ((SAYS_READ, ""), (AWAITS_SENDING, f"{SAYS_READ} {AWAITS_SENDING}"))),
    Mutation("read_said_in_the_last_step", (("done > 0 && done + 1 < steps, READ", "done > 0, READ"),)),
    Mutation(
        "read_without_parity",
        (("READ + other + 2 * (done & 1)", "READ + other"), ("READ + group + 2 * (done + 1 & 1)", "READ + group")),
    ),
    Mutation("stored_into_the_other_buffer", (("ds_out + (done & 1) * DS", "ds_out + (done + 1 & 1) * DS"),)),
    Mutation("multiplied_from_the_other_buffer", (("(((step) & 1) *", "(((step) + 1 & 1) *"),)),
    Mutation(
        "multiplied_before_the_other_has_written",
        (("bar_sync(go, WRITTEN", "bar_sync(0, WRITTEN"), (SAYS_WRITTEN, "fence_async_shared();")),
    ),
    Mutation(
        "written_said_before_it_is",
        ((SAYS_WRITTEN, ""), ("store_score_gradients(ds_out", f"{SAYS_WRITTEN} store_score_gradients(ds_out")),
    ),
    Mutation(
        "written_said_before_the_fence",
        ((SAYS_WRITTEN, f"{SAYS_WRITTEN.removeprefix('fence_async_shared();')} fence_async_shared();"),),
    ),
    Mutation("no_fence_after_ds", ((SAYS_WRITTEN, SAYS_WRITTEN.removeprefix("fence_async_shared();")),)),
    Mutation(
        "written_without_parity",
        (
            ("WRITTEN + other + 2 * (done + 1 & 1)", "WRITTEN + other"),
            ("WRITTEN + group + 2 * (done & 1)", "WRITTEN + group"),
        ),
    ),
    Mutation("ds_of_the_other_keys", (("SHARED_DS + group * WALK", "SHARED_DS + other * WALK"),)),
)

OF_SHARES = (
    Mutation("overwritten_while_it_is_sent", ((AWAITS_SENDING, "__syncwarp(); wgmma_wait(1);"),)),
    Mutation(
        "the_last_but_one_overwritten",
        (("bulk_wait_read(); __syncwarp(); wgmma_wait(0);", "__syncwarp(); wgmma_wait(0);"),),
    ),
    Mutation("one_lane_knows_that_it_was_sent", ((AWAITS_SENDING, "bulk_wait_read(); wgmma_wait(1);"),)),
    Mutation("ends_while_it_is_sent", (("share_out); bulk_wait_read(); end", "share_out); end"),)),
    Mutation("sent_without_a_fence", ((READY, "__syncwarp(); bulk_add"),)),
    Mutation("sent_before_all_lanes_have_fenced", ((READY, "fence_async_shared(); bulk_add"),)),
    Mutation("never_committed", (("bulk_commit();", ""),)),
    Mutation("the_last_is_not_sent", (("send_share(last.exists,", "send_share(0,"),)),
    Mutation("the_last_but_one_is_not_sent", (("ISSUE_DQ(steps > 0); SEND_SHARE();", "ISSUE_DQ(steps > 0);"),)),
    Mutation("sent_a_step_too_early", ((SENDS, SENDS.replace("sent", "last")),)),
    Mutation(
        "sent_where_the_next_belongs",
        (("sent = last; last.head", "last.head"), ("last.block < p.blocks;", "last.block < p.blocks; sent = last;")),
    ),
    Mutation("a_share_of_nothing", (("share last = {w.head, 0, 0}", "share last = {w.head, 0, 1}"),)),
    Mutation("blocks_past_the_last_row", (("last.exists = last.block < p.blocks;", "last.exists = 1;"),)),
    Mutation(
        "units_of_the_share_before",
        (("*unit_of_row(&p, w.batch, &last,", "*unit_of_row(&p, w.batch, &sent,"),),
    ),
    Mutation("another_share_is_marked", ((MARKS, MARKS.replace("last", "sent")),)),
    Mutation("no_share_is_marked", (("bytes * NAN_UNIT", "bytes * 0"),)),
    Mutation("one_row_in_four_is_marked", (("bytes * NAN_UNIT", "(bytes & 1) * NAN_UNIT"),)),
    Mutation("marked_though_it_is_nothing", (("go = s->exists && left > 0", "go = left > 0"),)),
    Mutation(
        "nothing_to_tell_to_the_words_of_rows",
        (("go ? p->units + unit + row : own_line", "p->units + unit + row + 0 * (int64_t)own_line"),),
    ),
    Mutation("nothing_to_tell_to_one_line", (("+ warp * 32 + lane;", "+ 0 * warp + lane;"),)),
    Mutation("rows_past_the_end_are_marked", (("& 0xffffu >> 4 * (4 - max(min(left, 4), 1))", "& 0xffffu"),)),
    Mutation("rows_of_the_word_before", (("row = 4 * lane - before;", "row = 4 * lane - 0 * before;"),)),
    Mutation("both_warpgroups_send_to_one_box", (("+ (SPLITS_ROWS ? 0 : group);", "+ 0 * group;"),)),
    Mutation("only_half_is_stored", (("store_share(share_out + lane * 16, dq, unit, DQ_FLOATS / 2); TRY", "TRY"),)),
)

ONE_PASS = replace(BACKWARD, source="one_pass.cu", mutations=OF_STAGES + OF_WAITS + OF_PRODUCTS + OF_DS + OF_SHARES)
