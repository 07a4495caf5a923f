"""What limits work in a process: slots, gateway calls, room in the storage, turns of background
work."""
