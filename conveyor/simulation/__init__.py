"""The simulator: runs the real program from one seed, in virtual time, with injected faults, and
checks the invariants of SPEC.md 6.

`conveyor simulate --seed N` replays one world, `--seeds N` runs many. The seed decides everything:
the order in which Trio runs tasks (deterministic_trio.py), the options of the world (options.py),
and every random number. Each part draws from a stream of its own (`SimContext.random`), so a change
of one part does not change what another draws. The same seed gives the same trace in every process
and under every PYTHONHASHSEED. Therefore neither the simulator nor the program may read the wall
clock, enter a thread, iterate a set in hash order, or draw from a source that it was not given.

The parts:
- simulator.py runs one seed: a phase with faults, in which safety is checked; a phase without
  faults, in which every run must end; hours without any client or process; and the last checks.
- process.py has `Process`, an API or a worker: the real composition root, use cases, actors and
  engine. A process that ends is started again.
- faults/ has the catalogue of faults, what happens to whole processes (fault_scheduler.py), and
  what happens to single calls (fault_injector.py): each call of a process to its engine may be
  delayed or refused, or may kill the process before or after its effect.
- backends/ has one `Backend` per engine. It opens the engine for each process and reads all its
  rows for the checkers.
- models/ has models of DynamoDB, SQS, S3, Redis and PostgreSQL, on which the real engines run.
- environment/ has the sites, the scraping gateway and the webhook receivers. They take the place of
  the connection pool below the real gateways and the real notifier.
- clients/ has the callers. They send requests to the real ASGI application, and client_history.py
  records what they were answered.
- invariant_monitor.py calls the checkers (checkers/) after writes, and on the events that they ask
  for.

To add
- a checker: see checkers/__init__.py. It receives a `StateChange` (the rows before and after, the
  changed rows and the history) and yields one sentence per violation. List it in `ALL`. If it must
  know what happened outside of the engine, record that in `History` where it happens.
- an action of clients: write `async def verb_a_thing(client)` in clients/actions.py or a file
  beside it, and list it in `ACTIONS` with a weight. Use `client.post`, `client.get` and
  `client.reliably`, which repeat a request until its answer is final. An action may be cancelled at
  any point.
- a fault: name it in faults/faults.py, give it rates in options.py (0 for most seeds), and call
  `faults.occurs(...)` where it happens, or add it to faults/fault_scheduler.py if it happens to a
  whole process. A suite of at least `JUDGED_FROM` seeds in which it never occurred fails. `ONLY_ON`
  lists the engines that can have it.
- an engine: write a `Backend`; `MemoryBackend` is the shortest one.

A mutant is a defect that a test puts into the program before it calls `simulate`; the simulator
knows nothing about mutants. To look into a failure, `--seed N --trace FILE` writes every line of
the trace; `grep` for an id finds everything that happened to its row.
"""
