"""Plain values that every other part of the server speaks about. No I/O, no clock."""
