"""Pop: messages are given out singly, for a time, and settled one by one; the tables and the rules, without I/O."""
