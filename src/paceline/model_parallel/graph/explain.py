"""A plan as text: each group's place and time, transfers, the distance from the optimum, and the alternatives."""

from __future__ import annotations

from paceline.model_parallel.graph.plan_data import PlanData

_FLAT = 0.05  # share of a step below which a plan is said to gain nothing
_MOST_ROWS = 60


def rows(plan: PlanData) -> list[tuple[str, int, float, float, int, float | None]]:
    """By group, in running order: name, device, start and end of its first forward pass, bytes in, elsewhere.

    The last is how many seconds longer the step would be with the group on the best other device; None: no other device may
    run it.
    """
    problem, device_of = plan.problem, plan.placement.device_of
    first = {(e.name, e.place): e for e in reversed(plan.schedule().events) if e.kind == "forward" and not e.microbatch}
    found = []
    for index in plan.placement.order:
        group, device = problem.groups[index], device_of[index]
        event = first[group.name, device]
        num_bytes = sum(
            problem.tensors[t].num_bytes
            for t in problem.reads[index]
            if device_of[problem.tensors[t].producer] != device
        )
        found.append((group.name, device, event.start_s, event.end_s, num_bytes, plan.elsewhere_s(index)))
    return sorted(found, key=lambda one: (one[2], one[1]))


def verdict(plan: PlanData) -> str:
    """One or two sentences: the plan's gain over one device, and its distance from the optimum."""
    one_s, step_s = plan.one_device_s, plan.makespan_s
    number = len(plan.problem.groups)
    near = (
        f"no placement and order of its {number} groups is faster in simulation"
        if plan.placement.is_certain
        else f"the best found for its {number} groups, at most {_gap(plan):.0%} above the lower bound"
    )
    used = len(set(plan.placement.device_of))
    if used == 1:
        why = (
            "its parts wait for each other, so that a second device would idle"
            if plan.bounds.path_s > 0.9 * plan.one_device_s
            else "sending would take longer than it saves"
        )
        hint = "" if plan.problem.microbatches > 1 else '; objective="throughput" keeps several micro-batches in flight'
        return f"All on one device, 1.0x: {why}{hint} ({near})."
    gain = one_s / step_s if step_s else 1.0
    if gain < 1 + _FLAT:
        return f"{used} devices, {gain:.2f}x one device: it is split for memory or by pins, and gains no time ({near})."
    return f"{used} devices, {gain:.2f}x one device ({near})."


def _gap(plan: PlanData) -> float:
    return plan.makespan_s / plan.bounds.least_s - 1 if plan.bounds.least_s else 0.0


def explain(plan: PlanData) -> str:
    """A table of groups and some lines below it."""
    micro = plan.problem.microbatches
    lines = [
        f"{plan.model} on {plan.workers} devices, for {plan.objective}"
        + (f" with {micro} micro-batches" if micro > 1 else "")
        + f", placed by {plan.placement.placer}.",
        verdict(plan),
        "",
        f"{'group':28} {'device':>6} {'start':>10} {'finish':>10} {'bytes in':>12} {'elsewhere':>10}",
    ]
    table = rows(plan)
    for name, device, start_s, end_s, num_bytes, longer_s in table[:_MOST_ROWS]:
        elsewhere = "-" if longer_s is None else f"{longer_s * 1e3:+.2f} ms"
        lines.append(
            f"{name:28.28} {device:6d} {start_s * 1e3:7.2f} ms {end_s * 1e3:7.2f} ms {num_bytes:12,d} {elsewhere:>10}"
        )
    if len(table) > _MOST_ROWS:
        lines.append(f"... and {len(table) - _MOST_ROWS} more groups")
    lines += ["", *_below(plan)]
    return "\n".join(lines)


def _below(plan: PlanData) -> list[str]:
    problem, below = plan.problem, plan.bounds
    schedule, transfers = plan.schedule(), plan.transfers()
    sent = sum(problem.tensors[one.tensor].num_bytes for one in transfers)
    others = ", ".join(f"{name} {took_s * 1e3:.2f} ms" for name, took_s in plan.others)
    lines = [
        f"Step (forward and backward): {plan.makespan_s * 1e3:.2f} ms simulated; on one device"
        f" {plan.one_device_s * 1e3:.2f} ms.",
        f"No placement is below {below.least_s * 1e3:.2f} ms: longest path {below.path_s * 1e3:.2f} ms, all work over all"
        f" speeds {below.work_s * 1e3:.2f} ms. This one is {_gap(plan):.0%} above.",
        f"Transfers: {len(transfers)} of {sent / 1e6:.3f} MB in each forward pass"
        + (f", floats as {plan.wire} on the way." if plan.wire else "."),
        f"Links: {problem.link.move_s(0) * 1e6:.0f} us and {problem.link.bytes_per_s / 1e6:.4g} MB/s"
        + "".join(f"; {a} to {b} takes {factor:.3g} times as long" for a, b, factor in problem.link_factors)
        + ".",
        "Devices compute "
        + ", ".join(f"{busy / plan.makespan_s:.0%}" if plan.makespan_s else "0%" for busy in schedule.busy_s)
        + " of the time; elsewhere: how much longer the step would be with that group on the best other device.",
    ]
    if plan.is_verified:
        lines.append(
            "Verified: on the example, a step of the parts has the model's own outputs, gradients and buffers."
        )
    memory = problem.memory_of(plan.placement.device_of)
    lines.append("Memory: " + ", ".join(f"device {d}: {used / 1e6:,.1f} MB" for d, used in enumerate(memory)) + ".")
    if others:
        lines.append(f"Others: {others}.")
    if plan.step_s:
        lines.append(
            f"Cost model: blocks add up to {plan.sum_s * 1e3:.2f} ms, a step in one piece took {plan.step_s * 1e3:.2f} ms"
            f" ({plan.error:.0%} off)."
        )
    return lines
