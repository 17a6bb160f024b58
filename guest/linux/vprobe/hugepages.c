// SPDX-License-Identifier: GPL-2.0
/*
 * Whether this kernel frees metadata of huge pages. If it does, a page that held metadata may
 * become a process's, while the record still names it.
 */
#include <linux/err.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/kernel.h>
#include <linux/mount.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/version.h>

#include "vprobe.h"

#define SYSCTL		"sys/vm/hugetlb_optimize_vmemmap"
/* The parameter at boot, where there is no sysctl: in Linux 5.14 to 5.18. */
#define PARAMETER	"hugetlb_free_vmemmap="
#define CAN_FREE	(IS_ENABLED(CONFIG_HUGETLB_PAGE_FREE_VMEMMAP) || \
			 IS_ENABLED(CONFIG_HUGETLB_PAGE_OPTIMIZE_VMEMMAP))
#define BY_DEFAULT	(IS_ENABLED(CONFIG_HUGETLB_PAGE_FREE_VMEMMAP_DEFAULT_ON) || \
			 IS_ENABLED(CONFIG_HUGETLB_PAGE_OPTIMIZE_VMEMMAP_DEFAULT_ON))
#define COMMAND_LINE_MAX	(2 * PAGE_SIZE)

/*
 * A mount of this module's own. The one at /proc may be missing, or out of sight: a thread of the
 * kernel sees no directory of a process's.
 */
static struct vfsmount *proc;
static struct file *sysctl;	/* NULL: there is none */
static bool at_boot;

static struct file *open_in_proc(const char *name)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(5, 14, 0)
	return file_open_root_mnt(proc, name, O_RDONLY, 0);
#else
	return file_open_root(proc->mnt_root, proc, name, O_RDONLY, 0);
#endif
}

/* Whether a command line has the parameter with any value but "off". */
static bool asks_for_it(char *line)
{
	char *at;

	/* To this kernel, the two are the same in a name. */
	for (at = line; *at; at++)
		if (*at == '-')
			*at = '_';
	for (at = line; (at = strstr(at, PARAMETER)); ) {
		at += strlen(PARAMETER);
		if (strncmp(at, "off", 3))
			return true;
	}
	return false;
}

static int read_command_line(void)
{
	struct file *file;
	char *line;
	ssize_t bytes;
	loff_t from = 0;

	file = open_in_proc("cmdline");
	if (IS_ERR(file))
		return PTR_ERR(file);
	line = kzalloc(COMMAND_LINE_MAX, GFP_KERNEL);
	bytes = line ? kernel_read(file, line, COMMAND_LINE_MAX, &from) : -ENOMEM;
	if (bytes == COMMAND_LINE_MAX)
		bytes = -E2BIG;
	if (bytes >= 0)
		at_boot = asks_for_it(line);
	kfree(line);
	fput(file);
	return bytes < 0 ? bytes : 0;
}

/* Finds out where this kernel says it. */
int vprobe_hugepages_open(void)
{
	struct file_system_type *type = get_fs_type("proc");
	int error = 0;

	if (!type)
		return -ENODEV;
	proc = kern_mount(type);
	if (IS_ERR(proc))
		return PTR_ERR(proc);
	sysctl = open_in_proc(SYSCTL);
	if (!IS_ERR(sysctl))
		return 0;
	error = PTR_ERR(sysctl);
	sysctl = NULL;
	if (error == -ENOENT) {
		at_boot = BY_DEFAULT;
		error = CAN_FREE && !at_boot ? read_command_line() : 0;
	}
	if (error)
		kern_unmount(proc);
	return error;
}

/*
 * Returns 0 if huge pages keep all their metadata from now on, and -EOPNOTSUPP if they do not. Any
 * other error means that this kernel does not tell.
 */
int vprobe_hugepages_check(void)
{
	char text[8];
	loff_t from = 0;
	ssize_t bytes;

	if (!sysctl)
		return at_boot ? -EOPNOTSUPP : 0;
	bytes = kernel_read(sysctl, text, sizeof(text), &from);
	if (bytes < 0)
		return bytes;
	return bytes == 2 && text[0] == '0' && text[1] == '\n' ? 0 : -EOPNOTSUPP;
}

void vprobe_hugepages_close(void)
{
	if (sysctl)
		fput(sysctl);
	kern_unmount(proc);
}
