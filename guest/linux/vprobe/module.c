// SPDX-License-Identifier: GPL-2.0
/*
 * Registers this kernel's page metadata with the host, so that the host can take free memory
 * back. docs/vprobe.md of Ebb describes the record and what this kernel promises.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/err.h>
#include <linux/kernel.h>
#include <linux/kmemleak.h>
#include <linux/memory.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/notifier.h>
#include <linux/reboot.h>
#include <linux/suspend.h>
#include <linux/version.h>
#include <linux/workqueue.h>

#include "vprobe.h"

#define LOOK_INTERVAL	HZ

/* Why there may be no registration now. */
enum {
	HOLD_HOTPLUG = 1,
	HOLD_SLEEP = 2,
	HOLD_END = 4,
};

/*
 * Guards the record and the holds. Notifiers wait for it, so nothing under it waits for a lock of
 * memory or processor hotplug. While it is held and there is no HOLD_HOTPLUG, no memory goes
 * online or offline.
 */
static DEFINE_MUTEX(lock);
static unsigned int holds;
static struct vprobe_record *record;
static int last_error;
static u64 logged_token;
static u32 logged_answer;

static void look(struct work_struct *work);
static DECLARE_DELAYED_WORK(look_work, look);

static const char *meaning(int error)
{
	switch (error) {
	case -EOPNOTSUPP:
		return "huge pages free metadata (vm.hugetlb_optimize_vmemmap, hugetlb_free_vmemmap)";
	case -EBUSY:
		return "there are huge pages that have freed metadata";
	case -ENODATA:
		return "no online memory is found";
	default:
		return "unexpected";
	}
}

/* Registers, unless this error speaks against it: then withdraws. */
static int update(int error)
{
	if (holds || (!error && vprobe_record_is_registered(record)))
		return 0;
	if (error)
		vprobe_record_withdraw(record);
	else
		error = vprobe_record_register(record);
	if (error && error != last_error)
		pr_warn("no registration: %s (%d)\n", meaning(error), error);
	else if (!error)
		pr_info("registered %u range(s) of metadata, by the record at %#llx\n",
			record->range_count, record->own_physical);
	last_error = error;
	return error;
}

static void log_once(void)
{
	u32 answer = READ_ONCE(record->answer);

	if (logged_token == record->token && logged_answer == answer)
		return;
	logged_token = record->token;
	logged_answer = answer;
	vprobe_log_answer(answer);
}

/* Looks what the host has done. Only this sets the breakpoint. */
static void look(struct work_struct *work)
{
	int error = vprobe_hugepages_check();
	bool unanswered = false;

	mutex_lock(&lock);
	update(error);
	if (vprobe_record_is_registered(record)) {
		unanswered = !vprobe_record_is_answered(record);
		if (!unanswered)
			log_once();
	}
	mutex_unlock(&lock);
	vprobe_prove(record, unanswered);
	schedule_delayed_work(&look_work, LOOK_INTERVAL);
}

static void hold(unsigned int reason)
{
	mutex_lock(&lock);
	holds |= reason;
	vprobe_record_withdraw(record);
	mutex_unlock(&lock);
}

/*
 * The next look registers anew. By then, several changes in a row may have ended. A change that
 * began before this module was loaded has had no hold, so this withdraws as well.
 */
static void release(unsigned int reason)
{
	mutex_lock(&lock);
	holds &= ~reason;
	vprobe_record_withdraw(record);
	mutex_unlock(&lock);
}

static int on_hotplug(struct notifier_block *block, unsigned long action, void *data)
{
	switch (action) {
	case MEM_GOING_ONLINE:
	case MEM_GOING_OFFLINE:
		hold(HOLD_HOTPLUG);
		break;
	case MEM_ONLINE:
	case MEM_OFFLINE:
	case MEM_CANCEL_ONLINE:
	case MEM_CANCEL_OFFLINE:
		release(HOLD_HOTPLUG);
		break;
	}
	return NOTIFY_OK;
}

static int on_sleep(struct notifier_block *block, unsigned long action, void *data)
{
	switch (action) {
	case PM_HIBERNATION_PREPARE:
	case PM_SUSPEND_PREPARE:
	case PM_RESTORE_PREPARE:
		hold(HOLD_SLEEP);
		break;
	case PM_POST_HIBERNATION:
	case PM_POST_SUSPEND:
	case PM_POST_RESTORE:
		release(HOLD_SLEEP);
		break;
	}
	return NOTIFY_OK;
}

/* A kexec comes by here too: another kernel has the memory next. */
static int on_reboot(struct notifier_block *block, unsigned long action, void *data)
{
	hold(HOLD_END);
	return NOTIFY_DONE;
}

static struct notifier_block hotplug_notifier = { .notifier_call = on_hotplug };
static struct notifier_block sleep_notifier = { .notifier_call = on_sleep };
static struct notifier_block reboot_notifier = { .notifier_call = on_reboot, .priority = INT_MAX };

/* Tells why this kernel cannot register, if it cannot. */
static const char *obstacle(void)
{
	if (LINUX_VERSION_CODE < KERNEL_VERSION(5, 10, 0))
		return "this kernel is older than Linux 5.10";
	if (!IS_ENABLED(CONFIG_X86_64))
		return "this processor is not x86-64";
	if (!IS_ENABLED(CONFIG_SPARSEMEM_VMEMMAP))
		return "this kernel has no virtual memory map (CONFIG_SPARSEMEM_VMEMMAP)";
	if (PAGE_SIZE % sizeof(struct page))
		return "a struct page of this kernel can lie in two pages";
	return NULL;
}

static int __init vprobe_init(void)
{
	const char *why = obstacle();
	int error;

	if (why) {
		pr_err("not loaded: %s\n", why);
		return -EOPNOTSUPP;
	}
	record = vprobe_record_new();
	if (IS_ERR(record)) {
		error = PTR_ERR(record);
		pr_err("not loaded: %s (%d)\n",
		       error == -ENOMEM ? "no memory" : "a helper has no valid length", error);
		return error;
	}
	error = vprobe_hugepages_open();
	if (error)
		goto free;
	error = register_memory_notifier(&hotplug_notifier);
	if (error)
		goto hugepages;
	error = register_pm_notifier(&sleep_notifier);
	if (error)
		goto hotplug;
	error = register_reboot_notifier(&reboot_notifier);
	if (error)
		goto sleep;
	error = vprobe_hugepages_check();
	mutex_lock(&lock);
	error = update(error);
	mutex_unlock(&lock);
	if (error)
		goto reboot;
	schedule_delayed_work(&look_work, 0);
	return 0;

reboot:
	unregister_reboot_notifier(&reboot_notifier);
sleep:
	unregister_pm_notifier(&sleep_notifier);
hotplug:
	unregister_memory_notifier(&hotplug_notifier);
hugepages:
	vprobe_hugepages_close();
free:
	vprobe_record_free(record);
	pr_err("not loaded (%d)\n", error);
	return error;
}

/*
 * The record's page stays behind for ever, withdrawn and mapped: a host that has begun to answer
 * may still write to it. Each load that registers costs one page.
 */
static void __exit vprobe_exit(void)
{
	hold(HOLD_END);
	unregister_reboot_notifier(&reboot_notifier);
	unregister_pm_notifier(&sleep_notifier);
	unregister_memory_notifier(&hotplug_notifier);
	cancel_delayed_work_sync(&look_work);
	vprobe_prove(record, false);
	vprobe_hugepages_close();
	kmemleak_not_leak(record);
	pr_info("withdrawn\n");
}

module_init(vprobe_init);
module_exit(vprobe_exit);
MODULE_DESCRIPTION("Registers the page metadata with the host, so that it can reclaim free memory");
MODULE_LICENSE("GPL");
