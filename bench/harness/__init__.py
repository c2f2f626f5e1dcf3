"""What every measurement needs: rows of results, timing, real ranks, devices. Knows no question."""
