"""Alert rules over folded values: pure functions of values, steps and time. No I/O, no clock."""
