"""What a worker asks before it fetches: slots, gateway calls, room in the storage."""
