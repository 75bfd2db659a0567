"""What every experiment needs: inputs, estimates with intervals, tables, progress, the machine."""
