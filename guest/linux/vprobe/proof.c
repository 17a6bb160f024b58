// SPDX-License-Identifier: GPL-2.0
/*
 * The proof that this kernel made the record: a hardware breakpoint at the record, which no
 * process can set at an address of the kernel. The host sees it in the debug registers.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/err.h>
#include <linux/hw_breakpoint.h>
#include <linux/perf_event.h>
#include <linux/printk.h>

#include "vprobe.h"

static struct perf_event * __percpu *breakpoint;
static bool complained;

/* Nobody writes to the watched byte. If somebody did, there would be nothing to do. */
static void hit(struct perf_event *event, struct perf_sample_data *data, struct pt_regs *regs)
{
}

static void arm(const struct vprobe_record *record)
{
	struct perf_event * __percpu *made;
	struct perf_event_attr attr;
	unsigned long value;

	hw_breakpoint_init(&attr);
	attr.bp_addr = (unsigned long)record;
	attr.bp_len = HW_BREAKPOINT_LEN_1;
	attr.bp_type = HW_BREAKPOINT_W;
	made = register_wide_hw_breakpoint(&attr, hit, NULL);
	/* The older kernels have no IS_ERR for addresses of per-CPU memory. */
	value = (__force unsigned long)made;
	if (!IS_ERR_VALUE(value)) {
		breakpoint = made;
		complained = false;
	} else if (!complained) {
		pr_warn("no breakpoint is free (%ld), which the host waits for: trying again\n",
			(long)value);
		complained = true;
	}
}

/*
 * Sets the breakpoint, or takes it away. Only one thread calls this at a time. It takes the locks
 * of processor hotplug, so no caller may hold a lock that a notifier waits for.
 */
void vprobe_prove(const struct vprobe_record *record, bool wanted)
{
	if (wanted && !breakpoint) {
		arm(record);
	} else if (!wanted && breakpoint) {
		unregister_wide_hw_breakpoint(breakpoint);
		breakpoint = NULL;
	}
}
