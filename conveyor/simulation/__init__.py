"""The simulation: the real engine code over models of the services, in virtual time (SPEC 5.11)."""
