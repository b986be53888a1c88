"""Fields of k bits packed into uint32 words."""
