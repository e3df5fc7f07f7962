"""Real servers, databases, browsers and wire connections for the tests."""
