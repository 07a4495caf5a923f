"""Pure tests of the decisions: no engine, no clock, no Trio."""
