"""What limits fetches in a process: slots, gateway calls, room in the storage."""
