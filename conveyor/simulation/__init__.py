"""The simulator: the real program, from one seed, in a world that is worse than the real one.

`conveyor simulate --seed N` replays a world, `--seeds N` runs many. Everything follows from the
seed: Trio's scheduling (kernel.py), the options of the world (options.py), and every draw, each
part from a stream of its own (Stage.random). The same seed makes the same trace, in any process
and under any PYTHONHASHSEED; so nothing here or in the program may read the wall clock, enter a
thread, iterate a set in hash order or draw from anything but what it was given.

The parts: simulator.py runs one seed: safety with faults, then calm and liveness, then hours in
which nobody is there, then the last checks. A Process (process.py) is an API or a worker: the
real composition root, use cases, actors and engine, life after life. Each of its calls to an
engine passes its Life (life.py), where it is delayed, refused, killed before or after its effect.
A Backend (backends.py) is the engine under all processes, and can be peeked into. The web
(web.py) stands in for the pool of connections under the real gateways and the real notifier.
Clients (clients/) talk ASGI to the real application and record what they were told in the History.
The Watcher asks the checkers (checkers/) after every write, or every few, as the seed has it.

To add
- a checker: see checkers/__init__.py. It gets a Moment (rows before, after, changes, history) and
  yields sentences; list it in ALL. Nothing else is needed. If it must know more of what happened
  outside, have the History remember that, where it happens.
- a client's action: write `async def verb_a_thing(client)` in clients/actions.py (or in a file
  beside it) and list it in ACTIONS with a weight. Use `client.post`, `client.get` and
  `client.reliably`, which repeat until the answer is final; an action may be cut off anywhere.
- a fault: name it in faults.py, give it rates in options.py (most seeds should be without it), and
  ask `faults.strikes(...)` where it happens, or do it in chaos.py if it happens to a whole process.
  A suite of JUDGED_FROM seeds in which it never struck fails. ONLY_ON says which engines have it.
- an engine: a Backend that opens ports for a Life and can be peeked into; see MemoryBackend.

A defect to be found on purpose (a mutant) is a change of the program, made before `simulate` is
called; the simulator knows of none. To look into a failure: `--seed N --trace FILE` writes every
line, reads included; `grep` for an id in it tells the story of a row.
"""
