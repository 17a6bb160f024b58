/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What this kernel does: it obeys the lines that come from the console. */
#include "content.h"
#include "frames.h"
#include "interrupts.h"
#include "registration.h"
#include "serial.h"

#define LINE_BYTES 80
/* The chipset's power management, where the firmware has put it: sleep type 0, and go. */
#define POWER_CONTROL 0x604
#define POWER_OFF 0x2000

static bool is_command(const char *line, const char *command, u64 *argument)
{
	for (; *command; line++, command++) {
		if (*line != *command)
			return false;
	}
	*argument = 0;
	if (!*line)
		return true;
	if (*line++ != ' ' || !*line)
		return false;
	for (; *line >= '0' && *line <= '9'; line++)
		*argument = *argument * 10 + (*line - '0');
	return !*line;
}

static void about(u64 none)
{
	(void)none;
	print_named("frame bytes", FRAME_BYTES);
	print_named("\ngreatest order", GREATEST_ORDER);
	for (u32 i = 0; i < ram_count; i++) {
		print_named("\nframes", frames[i].first);
		print_named(" to", frames[i].end);
		print(" metadata ");
		print_hex(frames[i].physical);
	}
	print("\nok about\n");
}

static void tell_free(u64 none)
{
	u64 bytes = 0;

	(void)none;
	for (u32 order = 0; order <= GREATEST_ORDER; order++) {
		u64 here = blocks_free(order) * (PAGE_BYTES << order);

		print_named("order", order);
		print_named(" blocks", blocks_free(order));
		print_named(" bytes", here);
		print("\n");
		bytes += here;
	}
	print_named("ok bytes", bytes);
	print("\n");
}

static void tell_found(struct found found)
{
	print_named("ok wrong", found.wrong);
	print_named(" zeroed", found.zeroed);
	print_named(" blocks", found.blocks);
	print("\n");
}

static void end(bool ok, const char *why_not)
{
	print(ok ? "ok" : "error ");
	print(ok ? "" : why_not);
	print("\n");
}

static void take(u64 count)
{
	tell_found(content_take(count));
}

static void check(u64 none)
{
	(void)none;
	tell_found(content_check());
}

static void give(u64 count)
{
	end(content_give(count) == count, "there were fewer");
}

static void loop(u64 seconds)
{
	tell_found(content_loop(seconds));
}

static void tidy(u64 none)
{
	(void)none;
	content_tidy();
	end(true, "");
}

static void make_registration(u64 none)
{
	(void)none;
	end(registration_make(), "it is registered");
}

static void withdraw(u64 none)
{
	(void)none;
	end(registration_withdraw(), "nothing is registered");
}

static void answer(u64 none)
{
	(void)none;
	print(registration_print() ? "ok acknowledged\n" : "ok waiting\n");
}

static void quit(u64 none)
{
	(void)none;
	end(true, "");
	out16(POWER_CONTROL, POWER_OFF);
	for (;;)
		wait_for_interrupt();
}

static const struct {
	const char *name;
	void (*run)(u64 argument);
} commands[] = {
	{ "about", about },
	{ "answer", answer },
	{ "check", check },
	{ "free", tell_free },
	{ "give", give },
	{ "loop", loop },
	{ "quit", quit },
	{ "register", make_registration },
	{ "take", take },
	{ "tidy", tidy },
	{ "withdraw", withdraw },
};

static void obey(const char *line)
{
	u64 argument;

	for (u32 i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
		if (is_command(line, commands[i].name, &argument)) {
			commands[i].run(argument);
			return;
		}
	}
	end(false, "unknown command");
}

/* Called by the start code. */
void kernel(u64 start_info);
void kernel(u64 start_info)
{
	char line[LINE_BYTES];
	u32 length = 0;

	serial_start();
	if (!memory_start(start_info)) {
		print("error no memory map\n");
		return;
	}
	registration_start();
	frames_start();
	interrupts_start();
	registration_make();
	print("ok ready\n");
	for (;;) {
		int character = serial_read();

		if (character < 0) {
			wait_for_interrupt();
		} else if (character == '\n') {
			line[length] = 0;
			length = 0;
			obey(line);
		} else if (character != '\r' && length < LINE_BYTES - 1) {
			line[length++] = character;
		}
	}
}
