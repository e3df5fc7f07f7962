"""From the log to series: merges ranks, watches rules, keeps the newest points, writes chunks. One owner per run."""
