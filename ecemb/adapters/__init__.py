"""Where tables come from: each adapter links one engine's tables to the arena."""
