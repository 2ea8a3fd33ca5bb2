"""What an accelerator needs: events, staging buffers, copies to the host past whatever hangs."""
