"""What `peers.py` makes of its figures: ours beside the best of the others, and tables for people."""

from __future__ import annotations

from typing import Any

SERVED = {("trackio", "server"), ("mlflow", "log_batch"), ("mlflow", "log_metrics")}
"""Peers whose values go through a server into its database."""


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours beside the best of the others, per workload; bytes beside those that have a server, as ours has."""
    summary = []
    measured = [row for row in rows if "error" not in row]
    for ours in (row for row in measured if row["tool"] == "gradiometer"):
        peers = [row for row in measured if row["workload"] == ours["workload"] and row is not ours]
        served = [row for row in peers if (row["tool"], row["mode"]) in SERVED]
        fastest = max(peers, key=lambda row: row["values_per_s"], default=None)
        smallest = min(served, key=lambda row: row["bytes_per_value"], default=None)
        entry: dict[str, Any] = {"workload": ours["workload"]}
        if fastest is not None:
            entry["fastest_peer"] = f"{fastest['tool']} {fastest['mode']}".strip()
            entry["values_per_s_ratio"] = round(ours["values_per_s"] / fastest["values_per_s"], 2)
            entry["cpu_ratio"] = round(fastest["cpu_us_per_value"] / ours["cpu_us_per_value"], 2)
        if smallest is not None:
            entry["smallest_server_side_peer"] = f"{smallest['tool']} {smallest['mode']}".strip()
            for kind in ("bytes_per_value", "bytes_per_value_vacuumed"):
                entry[f"{kind}_ratio"] = round(
                    ours[kind] / smallest.get(kind, smallest["bytes_per_value"]), 3
                )
        summary.append(entry)
    return summary


def table(result: dict[str, Any]) -> list[str]:
    """Markdown of what was written and read, and of what was lost."""
    lines = [
        "| | values | blocked per step p50, p99 | values/s | CPU per value | others | bytes/value, vacuumed | chart | latest of all |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["writes"]:
        name = f"{row['workload']}: {row['tool']} {row['mode']}".strip()
        if "error" in row:
            lines.append(f"| {name} | {row['error'][:80]} |")
            continue
        blocked = f"{row['blocked_p50_us']:,.0f} us, {row['blocked_p99_us']:,.0f} us"
        size = f"{row['bytes_per_value']}, {row.get('bytes_per_value_vacuumed', '-')}"
        reads = f"{row['reads']['chart_ms']} ms | {row['reads']['latest_ms']} ms"
        lines.append(
            f"| {name} | {row['values']:,} | {blocked} | {row['values_per_s']:,} | {row['cpu_us_per_value']} us "
            f"| {row['cores_of_others']} | {size} | {reads} |"
        )
    lines += ["", "| killed | steps/s | logged | lost |", "|---|---:|---:|---:|"]
    for row in result["kills"]:
        lost = row.get("lost", row.get("error", ""))
        name = f"{row['tool']} {row['mode']}".strip()
        lines.append(f"| {name} | {row['steps_per_s']} | {row.get('logged', '')} | {lost} |")
    return lines
