"""The agents' door: validates what they send, makes it durable, acknowledges it."""
